from transformers import LlamaForCausalLM

from .configuration_own import OwnConfig


class OwnForCausalLM(LlamaForCausalLM):  # type: ignore[misc, unused-ignore]
    config_class = OwnConfig
