"""Text and token ids: the tokenizer, prompt and chat templates, the detokenizer.

May import ``errors``, ``processes`` and ``request``. No I/O but loading. After a change: tests/unit/text
"""
