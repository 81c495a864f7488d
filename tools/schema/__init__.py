"""The schema that Cog's server reads, made from predict.py and train.py as ``cog build`` makes it.

After a change: pytest tests/unit/api/test_schema.py
"""
