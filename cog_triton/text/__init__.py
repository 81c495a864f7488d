"""Text and token ids: the tokenizer, prompt templates, the detokenizer, stop sequences. No I/O but loading.

May import ``errors`` and ``remote_code``. After a change: pytest tests/unit/text
"""
