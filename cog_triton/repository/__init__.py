"""Templates and values in, a filled and checked model repository out.

    fill.py       a repository, or one model of it, and problems that Triton or an engine would fail on
    variables.py  every variable, its type, default and old names; a YAML file of values
    derived.py    models that no template stands for

May import ``errors`` and ``wire``. After a change: pytest tests/unit/repository
"""
