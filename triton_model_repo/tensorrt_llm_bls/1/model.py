from cog_triton.models.bls import TritonPythonModel as TritonPythonModel
