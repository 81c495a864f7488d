"""One stream interface to a running Triton, and its two transports.

    stream.py          the interface: a client, its streams, and how they are stopped
    responses.py       the responses of a stream
    arrivals.py        the messages of an answer, between a transport and their reader
    silence.py         requests to which Triton sends nothing
    resume.py          requests that continue on the restarted server
    grpc_transport.py  over gRPC, on one long stream
    connections.py     the connections, made when they are needed
    connection.py      bytes: HTTP/2 and its calls, on h2
    demultiplexer.py   from messages to the frames of each request
    messages.py        Triton's messages of gRPC
    http_transport.py  over HTTP, by generate_stream
    tracing.py         spans of an answer and its steps; the tracer

May import ``adapters``, ``errors``, ``protocol``, and of ``text`` the end tokens.
After a change: pytest tests/unit/client tests/integration/test_generation.py
"""
