"""From the body of any API to the ``Request`` that the engine gets: a chat, its prompt and its tools.

    turn.py            a chat's request, and what its answer may be
    sampling.py        the fields of a ``Request`` that do not depend on the prompt
    prompt.py          messages and tools to the text that the model sees, by the chat template
    history.py         messages as chat templates know them
    token_ids.py       a prompt as token ids, cut to a length
    tool_use.py        which tools the model is offered, and whether it has to call one
    call_guides.py     the JSON schema of calls that have to be made
    loose_schemas.py   schemas of tools that are not strict
    custom_tools.py    tools whose input is a text
    contents.py        pictures and other parts that a model of text cannot read
    completions.py     /v1/completions to requests
    from_messages.py   Anthropic's /v1/messages to a chat
    from_responses.py  /v1/responses to a chat
    response_tools.py  its tools to functions, and calls to the client's names

May import ``schemas``, ``tool_calls``, ``errors.py`` and ``served.py``. After a change: pytest
tests/unit/api/openai/test_requests.py tests/unit/api/openai/test_tools.py
"""
