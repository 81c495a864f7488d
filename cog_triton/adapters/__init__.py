"""LoRA adapters: names to files, and files to what each engine takes.

    directory.py   finding, adding and removing adapters; their versions and numbers
    tensors.py     an adapter as the two tensors that TensorRT-LLM's C++ backend takes with a request
    layers.py      adapters in the transformers engine's model; peft_files.py reads them

May import ``errors``, ``protocol`` and ``request.limits``. After a change:
pytest tests/unit/adapters tests/compute/test_adapter_tensors.py tests/compute/test_lora.py
"""
