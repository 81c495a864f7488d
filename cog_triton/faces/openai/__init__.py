"""OpenAI's HTTP API, and Anthropic's, on a deployment, all in the same ``generate()`` as the Cog face.

    command.py     the face by itself, and embedded in Cog's predictor
    server.py      a server in this process, until a signal comes; workers.py several processes
    app.py         the application
    served.py      its state: the models' names, the deployment behind them, running requests
    fields.py      the bodies of requests; sampling.py makes a ``Request`` of them
    chat.py, completions.py, models.py, tokens.py
                   the routers; models.py has health as well
    page.py        the chat page at /, which is page.html
    responses/, messages/
                   /v1/responses, and Anthropic's /v1/messages, on the same chats
    turns.py       a chat to a request, and its answer's chunks to events: text, thoughts, calls
    answers.py     chunks to a response: as events or in one body, and the end of one whose client has gone
    choices.py     the generator of chats and text completions, whose responses are lists of choices
    openapi.py     schemas of errors and streams
    errors.py      which status and body each error has
    operation.py   the middleware: keys.py lets in, calls.py has what is known of a request, and metrics.py,
                   tracing.py and the log get it at its end
    tools/         tool calls in a model's text
    attached.py    a Triton that runs already; text_ensemble.py one whose ensemble gives text

May import everything but the other faces. After a change: pytest tests/unit/faces/openai
tests/integration/test_openai*.py
"""
