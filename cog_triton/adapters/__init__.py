"""LoRA adapters: names to files, and files to what each engine takes.

    directory.py  the adapters that are there, put there and taken away; their versions and numbers
    tensors.py    one as TensorRT-LLM's C++ backend takes it with a request
    cache.py      those in the transformers engine's model; layers.py how they are applied there

May import ``errors``, ``wire`` and ``request.limits``. After a change:
pytest tests/unit/adapters tests/unit/engines/test_lora.py
"""
