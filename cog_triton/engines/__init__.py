"""What fills the tensorrt_llm slot. Engines know token ids, never text.

May import ``remote_code``, and of ``text`` how many tokens of context a detokenizer needs; the simulated
engine, which has no model, tokenizes a text to answer with. After a change: pytest tests/unit/engines
"""
