"""What the client, the filled repository and the models inside Triton exchange.

    names.py       names of models, tensors and parameters of a request
    parameters.py  values of those parameters, and the inputs of a stop
    log_probs.py   log probabilities as values of a tensor
    frames.py      frames: new tokens of several requests in one response
    triton_messages.py  Triton's protobuf messages

May import ``errors`` and ``web``. After a change: pytest tests/unit/protocol tests/unit/client
tests/unit/models
"""
