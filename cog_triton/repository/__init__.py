"""Templates and values in, a filled and checked model repository out.

    fill.py            a repository, or one model of it
    render.py          one template and its values
    checks.py          problems on which Triton or an engine would fail later
    derived_models.py  models without a template of their own
    variables.py       every variable, its type, default and old names; a YAML file of values

May import ``errors`` and ``protocol``. After a change: pytest tests/unit/repository
"""
