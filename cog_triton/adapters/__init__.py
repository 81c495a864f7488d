"""LoRA adapters: names to files, and files to what each engine takes.

    directory.py  the adapters that are there, put there and removed; their versions and numbers
    tensors.py    one as TensorRT-LLM's C++ backend takes it with a request
    layers.py     those in the transformers engine's model

May import ``errors``, ``protocol`` and ``request.limits``. After a change:
pytest tests/unit/adapters tests/unit/engines/test_lora.py
"""
