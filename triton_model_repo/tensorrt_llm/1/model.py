from cog_triton.models.engine import TritonPythonModel as TritonPythonModel
