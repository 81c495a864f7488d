"""The side to compare with: Hugging Face's ``generate()`` in this process, greedy as well."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from cog_triton.errors import ConfigurationError
from cog_triton.text.tokenizer import Tokenizer
from tools.accuracy.engine import Answer, Answers, Progress
from tools.accuracy.metrics import until_end


class Reference:
    """A model of Hugging Face's, on its device. The model's own code is never run."""

    def __init__(
        self, model: str, tokenizer: Tokenizer, *, dtype: str, device: str, end_id: int | None
    ) -> None:
        """Loads the model.

        Args:
            model: a directory or a Hugging Face id.
            dtype: ``auto`` (as saved), or a name of PyTorch's.
            device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
            end_id: the token that ends an output.

        Raises:
            ConfigurationError: it cannot be loaded.
        """
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            loaded = AutoModelForCausalLM.from_pretrained(
                model, dtype=dtype, trust_remote_code=False
            )
            self._model = loaded.to(device).eval()
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigurationError(f"{model} cannot be loaded on {device}: {error}") from error
        self._tokenizer = tokenizer
        self._end_id = end_id
        pad_id = tokenizer.pad_token_id
        self._pad_id = pad_id if pad_id is not None else (end_id or 0)

    def answers(
        self,
        prompts: Sequence[str],
        batch_size: int,
        max_tokens: int,
        progress: Progress = lambda _: None,
    ) -> Answers:
        """Completes the prompts, ``batch_size`` at once; the first one before that, to warm up.

        Prompts of a batch are padded on the left and the padding masked. In half precision that can
        still change a token, so a batch of 1 is the most exact.
        """
        # What the model's files say of sampling and penalties would make it something else than greedy.
        self._model.generation_config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=self._end_id,
            pad_token_id=self._pad_id,
        )
        done: list[Answer] = []
        seconds = 0.0
        self._complete(prompts[:1])
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            began = time.perf_counter()
            done += self._complete(batch)
            seconds += time.perf_counter() - began
            progress(len(batch))
        return Answers(tuple(done), seconds)

    @torch.inference_mode()
    def log_probs(self, prompt: str, ids: Sequence[int]) -> list[float]:
        """The model's log probability of each output token, given the prompt and those before it."""
        if not ids:
            return []
        prompt_ids = self._tokenizer(prompt).input_ids
        tokens = torch.tensor([[*prompt_ids, *ids]], device=self._model.device)
        logits = self._model(input_ids=tokens).logits[0, len(prompt_ids) - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(1, tokens[0, len(prompt_ids) :, None])
        values: list[float] = chosen[:, 0].tolist()
        return values

    @torch.inference_mode()
    def _complete(self, prompts: Sequence[str]) -> list[Answer]:
        encoded = [self._tokenizer(prompt).input_ids for prompt in prompts]
        width = max(map(len, encoded))
        generated: Any = self._model.generate(
            input_ids=self._tensor([[self._pad_id] * (width - len(ids)) + ids for ids in encoded]),
            attention_mask=self._tensor(
                [[0] * (width - len(ids)) + [1] * len(ids) for ids in encoded]
            ),
        )
        outputs = [until_end(row, self._end_id) for row in generated[:, width:].tolist()]
        return [Answer(ids, self._text(ids)) for ids in outputs]

    def _tensor(self, rows: list[list[int]]) -> torch.Tensor:
        return torch.tensor(rows, device=self._model.device)

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text
