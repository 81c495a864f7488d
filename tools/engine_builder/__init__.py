"""Builds a TensorRT-LLM engine from a YAML file and packs it, with its tokenizer, into one tar.

TensorRT-LLM is not imported. What runs are its own scripts and its command ``trtllm-build``, those of
0.11 to 1.2: later versions have no engines.

    config.py      EngineConfig: what is built
    loading.py     the YAML file → EngineConfig; every problem of it at once
    forms.py       the two forms of that file: the keys of each
    migration.py   either form → the fields of EngineConfig
    arguments.py   the arguments of trtllm-build: the ones of now, and what became of older ones
    families.py    a model's type → the directory and the arguments of its convert_checkpoint.py
    scripts.py     which script is run, and where it is
    commands.py    EngineConfig → the command of every step
    tables.py      reads arguments.yaml and families.yaml
    tools.py       where TensorRT-LLM's commands and scripts are
    disk.py        whether there is room
    process.py     one command: its output as it comes, its time limit, its end
    redaction.py   what nobody may read in a log, an error or a tar
    plan.py        what would be run
    workdir.py     where a build happens
    build.py       the steps, one after the other
    package.py     the tar
"""
