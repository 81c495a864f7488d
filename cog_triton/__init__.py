"""A Cog predictor that runs Triton Inference Server with TensorRT-LLM as a subprocess."""

__version__ = "0.1.0"
