from transformers import LlamaConfig


class OwnConfig(LlamaConfig):  # type: ignore[misc, unused-ignore]
    model_type = "of_its_own"
