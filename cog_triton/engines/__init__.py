"""What fills the tensorrt_llm slot. Engines know token ids, never text.

May import nothing else of the package. After a change: pytest tests/unit/engines
"""
