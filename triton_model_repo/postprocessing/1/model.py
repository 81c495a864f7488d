from cog_triton.models.postprocessing import TritonPythonModel

__all__ = ["TritonPythonModel"]
