"""OpenAI's HTTP API, and Anthropic's, on a deployment, all in the same ``generate()`` as the Cog face.

    command.py     the face by itself, and embedded in Cog's predictor
    server.py      the lifecycle: a server in this process, until a signal comes; workers.py several
    app.py         the application, models, health and the chat page, page.html; served.py its state,
                   and the record of each request
    bodies.py      bodies are parsed and validated; fields.py has their fields, to a ``Request``
    answers.py     chunks to a response, as events or in one body, by the writer of an API
    completions.py /v1/chat/completions and /v1/completions, whose responses are lists of choices
    responses.py   /v1/responses; messages.py is Anthropic's /v1/messages
    tokens.py      /tokenize and /detokenize
    turns.py       a chat to a request, and the reader of its answer
    parsing.py     a model's text to events: text, thoughts, calls in the formats of models
    operation.py   the middleware: keys.py lets in; metrics.py and the log get each request at its end
    errors.py      the status and body of each error
    attached.py    a Triton that runs already, whose ensemble may give text

May import everything but the other faces. After a change: pytest tests/unit/faces/openai
tests/integration/test_openai*.py
"""
