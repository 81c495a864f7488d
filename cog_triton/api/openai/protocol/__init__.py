"""What clients get: the objects, events and errors of each API.

    writer.py          what a writer is: chunks to events or to a whole response; one for each API
    chat.py            the writer of /v1/chat/completions
    completions.py     the writer of /v1/completions
    choices.py         what these two share: lists of choices, and counts of tokens
    responses.py       the writer of /v1/responses, and the object that it fills
    messages.py        the writer of Anthropic's /v1/messages
    events.py          server-sent events, and ids
    log_probs.py       log probabilities of tokens, with their texts
    error_response.py  any error to a response, in the form of the API that was asked
    answering.py       the response that a writer makes, whose client may end it
    openapi.py         responses as /openapi.json describes them

May import ``chats`` and what that may import. After a change: pytest tests/unit/api/openai/test_answers.py
tests/unit/api/openai/test_app.py tests/unit/api/openai/test_refusals.py
"""
