"""What clients send: one module per API, each field with its type and its bound.

    base.py               the classes that all bodies share, and the check of their declarations
    values.py             types of values that several APIs have
    tools.py              tools and choices of tools of a chat
    structured_output.py  the fields that ask for JSON, or for another form of the output
    sampling.py           the fields that chats and completions share
    chat.py               /v1/chat/completions, and the part of it that /tokenize has too
    completions.py        /v1/completions
    tokens.py             /tokenize and /detokenize
    responses.py          /v1/responses
    messages.py           Anthropic's /v1/messages and its count_tokens
    files_and_batches.py  /v1/files, /v1/batches and the lines of a batch
    models.py             the query of /v1/models in Anthropic's form

A class declares everything that a client may send: a field that is read is a pydantic field, one that is
refused is in ``refused``, and one that is passed over is in ``ignored``. To add a field, edit its class and
nothing else; CONTRIBUTING.md has an example.

May import ``errors.py`` and the layers below ``api``. After a change: pytest
tests/unit/api/openai/test_schemas.py tests/unit/api/openai/test_requests.py
"""
