"""Engines for the tensorrt_llm slot. They know token ids, never text.

    base.py            the interface of an engine
    event_loop.py      base of those whose requests are coroutines
    serving.py         between Triton's requests and an engine
    transformers.py    transformers' continuous batching, with transformers_step.py (one step of it),
                       guides.py, grammars.py and grammar_trials.py (structured output), kv_events.py
    library.py         base of the next two; library_arguments.py has their arguments
    llm_api.py         TensorRT-LLM's LLM API
    interpreter.py     Python for the processes that engines start
    vllm.py            vLLM; vllm_arguments.py has its arguments, vllm_resume.py continues answers
    simulated.py       tokens without a model

May import ``adapters``, and of ``text`` the tokenizer and how much context a detokenizer needs.
After a change: pytest tests/unit/engines tests/compute
"""
