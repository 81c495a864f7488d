"""OpenAI's HTTP API, and Anthropic's, on a deployment, all in the same ``generate()`` as Cog's API.

    server.py      the lifecycle: in Cog's predictor, this process or several
    supervisor.py  the worker processes and their configuration; each of them runs workers.py
    app.py         the application, its middleware, models and health
    pages.py       the chat page, page.html, and the API's reference
    served.py      its state; the record of each request, its figures and span
    schemas/       what clients send, a module per API: each field with its type and bound
    validation.py  JSON to one of these, and the error of what is wrong with it
    chats/         a body of any API to the ``Request`` that the engine gets
    tool_calls/    a model's text to text, thoughts and calls
    exchange.py    bodies are read, chunks to a response by the writer of an API
    completions.py /v1/chat/completions and /v1/completions, whose responses are lists of choices; /tokenize
    responses.py   the forms of /v1/responses; messages.py is Anthropic's /v1/messages
    store.py       its routes: responses that are kept, and run in the background
    storable.py    JSON as the journal keeps it; paging.py reads the query of a list
    batches.py     /v1/files and /v1/batches; batch_runner.py runs the latter, batches.yaml has their tables
    journal.py     the SQLite file of all that is kept
    keys.py        API keys and their limits
    errors.py      the status and body of each error; apis.yaml has the tables of the APIs

May import everything but the other APIs. After a change: pytest tests/unit/api/openai
tests/integration/test_openai*.py
"""
