"""Engines for the tensorrt_llm slot. They know token ids, never text.

    base.py            what an engine is: requests in, tokens out
    create.py          the one that a configuration names
    serving.py         between Triton's requests and an engine
    transformers.py    transformers' continuous batching; _runner.py is one step of it, _rows.py its
                       requests, _router.py the way of their tokens, _cache.py what they share
    attention.py       its attention; token_sampling.py its sampling
    structured_output.py
                       what guides allow; guide_check.py tries them out in a process of its own
    llm_api.py         TensorRT-LLM's LLM API; _arguments.py, _requests.py and _sampler.py belong to it
    vllm.py            vLLM; _arguments.py, _processes.py and _requests.py belong to it
    event_loop.py      what both are: coroutines on a thread of their own; arguments.py: so are these
    simulated.py       tokens without a model

May import ``adapters``, and of ``text`` remote code and how many tokens of context a detokenizer needs;
the simulated engine, which has no model, tokenizes a text to answer with, and structured output reads the
vocabulary.
After a change: pytest tests/unit/engines
"""
