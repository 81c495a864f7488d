from .request import LoRARequest

__all__ = ["LoRARequest"]
