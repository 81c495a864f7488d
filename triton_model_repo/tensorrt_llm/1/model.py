from cog_triton.models.engine import TritonPythonModel

__all__ = ["TritonPythonModel"]
