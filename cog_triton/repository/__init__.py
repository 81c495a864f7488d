"""Templates and values in, a filled and checked model repository out.

    fill.py       a repository, or one model of it
    template.py   one template: its variables, and its text with their values
    variables.py  every variable: its type, its default, what it was called
    overrides.py  values by model and variable, from a YAML file
    checks.py     what Triton or an engine would refuse of the result
    derived.py    the models that no template stands for

May import ``errors`` and ``protocol``. After a change: pytest tests/unit/repository
"""
