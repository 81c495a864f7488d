"""POST /v1/messages: Anthropic's API, on the same chats.

``fields`` are the bodies; ``inputs`` makes a chat of them; ``writer`` makes the message of an answer's
events, whole or as typed events.
"""
