"""A stand-in for NVIDIA's tensorrt_llm where that cannot be installed: its LLM API and no more.

It has the names of tests/contracts/tensorrt_llm_llm_api.json, so that code which runs on it uses nothing
else, and needs no GPU: the model is made up (``model.py``). ``__version__`` may be set before an LLM is
made, whose arguments are those of that version. A model named ``broken`` does not load.
"""

from .llm import LLM
from .sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams"]
__version__ = "1.2.1"
