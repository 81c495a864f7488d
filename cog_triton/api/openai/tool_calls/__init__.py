"""A model's text to blocks: text, thoughts and calls of tools, in the form of each family of models.

    formats.py       the forms of calls, which formats.yaml has; a chat template to its form
    blocks.py        the parser of an answer: text and thoughts, piece by piece
    call_parsers.py  its subclasses, which find calls in the text
    written_calls.py calls that are whole, in forms other than JSON objects
    json_copier.py   JSON as it streams, with small mistakes mended

To teach the server another form, add it to ``formats.yaml``, with a reader in ``call_parsers.READERS`` if
its calls are written in a new way.

Does no I/O. May import nothing of the API server. After a change: pytest
tests/unit/api/openai/test_call_formats.py tests/unit/api/openai/test_tools.py
"""
