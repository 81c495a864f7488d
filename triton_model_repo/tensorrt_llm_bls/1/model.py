from cog_triton.models.bls import TritonPythonModel

__all__ = ["TritonPythonModel"]
