"""POST /v1/responses: OpenAI's newer API. Nothing is stored: each request has all of its conversation.

``fields`` are the bodies; ``inputs`` makes a chat of them, which is answered as every chat here is;
``output`` makes items of the answer's events, and ``writer`` the response, whole or as typed events.
"""
