"""OpenAI's HTTP API, and Anthropic's, on a deployment, all in the same ``generate()`` as Cog's API.

    server.py      the lifecycle: in Cog's predictor, this process or several
    supervisor.py  the worker processes and their configuration; each of them runs workers.py
    app.py         the application: its routes and its middleware
    middleware.py  around all routes: ids of requests, API keys, and the log
    routes/        plain functions, a module per API, that call the packages below
    schemas/       what clients send, a module per API: each field with its type and bound
    body_route.py  bodies are read, and parsed off the event loop where they are large
    validation.py  JSON to a class of schemas/, and the error of what is wrong with it
    chats/         a body of any API to the ``Request`` that the engine gets
    tool_calls/    a model's text to text, thoughts and calls
    protocol/      what clients get: a writer of events and objects per API
    errors.py      every error as a client reads it, in one table
    served.py      Served: the state of one application
    call.py        Call: the record of each request; figures.py and spans.py make figures and spans of it
    keys.py        API keys; quotas.py: how much each has used of its limits
    pages.py       the chat page, page.html, and the API's reference
    background.py  responses that run in the background, and their events
    batch_input.py the checks of a batch's input; batch_runner.py runs batches
    jobs.py        which rows this process runs, and when one that failed is tried again
    storage/       what is kept, in one SQLite file; storable.py is JSON as it is kept there
    paging.py      the query of a list, and its page
    background_tasks.py  tasks beside requests, whose failures are logged and reported

A request goes down this list as far as ``protocol``: its body becomes a class of ``schemas``, that becomes
a ``Request`` in ``chats``, and the answer's chunks become events in ``protocol``.

May import everything but the other APIs. After a change: pytest tests/unit/api/openai
tests/integration/test_openai*.py
"""
