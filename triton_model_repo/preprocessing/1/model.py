from cog_triton.models.preprocessing import TritonPythonModel

__all__ = ["TritonPythonModel"]
