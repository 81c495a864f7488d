"""Templates and values in, a filled and checked model repository out.

    fill.py       a repository, or one model of it, and problems that Triton or an engine would fail on;
                  models that no template stands for
    variables.py  every variable, its type, default and old names; a YAML file of values

May import ``errors`` and ``protocol``. After a change: pytest tests/unit/repository
"""
