"""OpenAI's HTTP API, and Anthropic's, on a deployment, all in the same ``generate()`` as the Cog face.

    app.py         the application, of what is served
    served.py      what is served: the models' names, the deployment behind them, the end
    fields.py      the bodies of requests; sampling.py makes a ``Request`` of them
    chat.py, completions.py, models.py, tokens.py, health.py
                   the routers
    page.py        the chat page at /, which is page.html
    responses/, messages/
                   /v1/responses, and Anthropic's /v1/messages, on the same chats
    turns.py       a chat to a request, and its answer's chunks to events: text, thoughts, calls
    answers.py     chunks to a response: as events or in one body, and the end of one whose client has gone
    choices.py     the form of chats and text completions, whose responses are lists of choices
    openapi.py     what the application's schema says of errors and streams
    wire.py        bytes of events and bodies
    errors.py      which status and body each error has
    operation.py   what is around the routes: keys.py and quotas.py let in, calls.py has what is seen of a
                   request, and metrics.py, tracing.py and the log are told of it at its end
    tools/         tool calls in a model's text
    serving.py     a process that serves; processes.py the command's, workers.py several that share a socket
    attached.py    a Triton that runs already
    beside.py      in the predictor, beside Cog's face

May import deployment, metrics, admission, generation, client, request, text, errors and settings. After a
change: pytest tests/unit/faces/openai tests/integration/test_openai*.py
"""
