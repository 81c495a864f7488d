"""The routes: plain functions, from a body to a request, and from a writer to a response.

    chat.py         /v1/chat/completions
    completions.py  /v1/completions
    messages.py     Anthropic's /v1/messages and its count_tokens
    tokens.py       /tokenize and /detokenize
    responses.py    /v1/responses, which are kept, continued from, and run in the background
    files.py        /v1/files
    batches.py      /v1/batches
    models.py       /v1/models, in OpenAI's form or Anthropic's
    operation.py    health, metrics and the version; what orchestrators and routers ask
    answers.py      several answers to a chat or to prompts

After a change: pytest tests/unit/api/openai tests/unit/test_access_table.py
"""
