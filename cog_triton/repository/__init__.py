"""Templates and values in, a filled and checked model repository out.

    fill.py       a repository, or one model of it
    variables.py  every variable, its type, default and old names; a YAML file of values
    checks.py     problems that Triton or an engine would fail on
    derived.py    models that no template stands for

May import ``errors`` and ``wire``. After a change: pytest tests/unit/repository
"""
