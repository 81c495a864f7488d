"""Build a TensorRT-LLM engine from a YAML file and pack it, with its tokenizer, into one tar.

TensorRT-LLM is not imported: its own scripts and its command ``trtllm-build`` run, those of 0.11 to 1.2;
later versions have no engines.

    config.py      the YAML file → EngineConfig, or every problem of it at once
    toolchain.py   where TensorRT-LLM's commands and scripts are; EngineConfig → the steps' commands
    build.py       the steps, one after the other, and the tar
"""
