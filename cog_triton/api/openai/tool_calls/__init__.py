"""A model's text to blocks: text, thoughts and calls of tools, in the form of each family of models.

    format.py            Format: the form in which a family of models writes calls
    formats.py           the known formats, which formats.yaml has; a chat template to its format
    blocks.py            Block; Parser, which reads an answer of text and thoughts piece by piece
    json_parser.py       its subclasses, which find calls: those that are JSON objects,
    marked_parser.py     those between marks,
    python_parser.py     a list of calls in Python,
    channel_parser.py    gpt-oss's messages with channels,
    recipient_parser.py  Functionary's messages with recipients
    readers.py           which function below reads the text between two marks
    json_calls.py        calls that are JSON objects
    tag_calls.py         calls in tags
    token_calls.py       calls whose parts special tokens separate
    gemma_calls.py       Gemma's calls; python_calls.py: calls in Python
    written_call.py      WrittenCall, which these functions return
    argument_values.py   arguments that are bare text to values, by the tool's schema
    json_values.py       JSON to values; json_copier.py: JSON as it streams, with small mistakes mended

To teach the server another form, add it to ``formats.yaml``. If its calls are written in a new way, write a
function that reads them and add it to ``readers.READERS``.

Does no I/O. May import nothing of the API server. After a change: pytest
tests/unit/api/openai/test_call_formats.py tests/unit/api/openai/test_tools.py
"""
