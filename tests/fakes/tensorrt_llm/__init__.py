"""A stand-in for NVIDIA's tensorrt_llm where that cannot be installed: its LLM API and no more.

It has the names of tests/contracts/tensorrt_llm_llm_api.json, so that code which runs on it uses
nothing else. The model is made up, see ``model.py``, and a GPU is not asked for. ``__version__`` may be
set before an LLM is made: its arguments and its sampler are those of that version, as far as they are
known (``llmapi/llm_args.py``, ``samplers.py``). These names as the
``model`` make something fail:

- ``broken``: it does not load;
- ``failing``: every request ends with an error of its own after a few tokens;
- ``dying``: the executor dies after a few tokens of the first request;
- ``silent``: no tokens come, ever.
"""

from .llm import LLM
from .sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams"]
__version__ = "1.2.1"
