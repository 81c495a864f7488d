"""What PEFT's own model says with an adapter, and an adapter of PEFT's own making."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.late import torch, transformers


def load(model: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model).eval()


def make_varied_adapter(model: Path, directory: Path) -> None:
    """One of PEFT's own making, of all layers but the last, with ranks, scales and biases of their own."""
    # PEFT needs it where an engine on transformers started in this process, which leaves it out.
    import torch.distributed.tensor
    from peft import LoraConfig, get_peft_model  # not in every environment of the tests

    torch.manual_seed(3)
    config = LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules="all-linear",
        rank_pattern={"q_proj": 7},
        alpha_pattern={"up_proj": 9},
        use_rslora=True,
        lora_bias=True,
        init_lora_weights=False,
    )
    peft = get_peft_model(load(model), config)
    for name, weight in peft.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    peft.save_pretrained(directory)


class Reference:
    """PEFT's model, which generates with one adapter at a time, or with none, whose name is empty."""

    def __init__(self, model: Path, adapters: Path) -> None:
        """With the adapters poet and bard of a directory."""
        from peft import PeftModel

        self._model = PeftModel.from_pretrained(load(model), str(adapters / "poet"), "poet")
        self._model.load_adapter(str(adapters / "bard"), "bard")
        self._model.eval()

    def ids(self, prompt: list[int], name: str, max_tokens: int) -> list[int]:
        with self._using(name):
            output = self._model.generate(
                input_ids=torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=None,
            )
        return list(output[0, len(prompt) :].tolist())

    def _using(self, name: str) -> Any:
        if not name:
            return self._model.disable_adapter()
        self._model.set_adapter(name)
        return nullcontext()
