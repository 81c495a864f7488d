"""The two sides of a comparison: prompts completed greedily, which can be compared token by token."""

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from cog_triton.client.grpc_transport import GrpcClient
from cog_triton.request.request import Request, triton_inputs
from cog_triton.text.detokenizer import IncrementalDetokenizer
from cog_triton.text.tokenizer import Tokenizer


class Answer(NamedTuple):
    """One side's output for a prompt; token ids before the end token."""

    ids: list[int]
    text: str


def in_batches(prompts: Sequence[str], size: int, title: str) -> Iterator[Sequence[str]]:
    for start in tqdm(range(0, len(prompts), size), desc=title, unit="batch"):
        yield prompts[start : start + size]


async def engine_answers(
    address: str, prompts: Sequence[str], tokenizer: Tokenizer, batch_size: int, max_tokens: int
) -> list[Answer]:
    """Complete the prompts by the engine behind Triton's gRPC endpoint."""
    answers: list[Answer] = []
    async with aclosing(GrpcClient(address, response_timeout=600)) as client:
        for batch in in_batches(prompts, batch_size, "engine"):
            asked = (_ask(client, tokenizer, max_tokens, prompt) for prompt in batch)
            answers += await asyncio.gather(*asked)
    return answers


async def _ask(client: GrpcClient, tokenizer: Tokenizer, max_tokens: int, prompt: str) -> Answer:
    """Complete one prompt: the ids are the engine's, and the text is made of them as by the predictor."""
    request = Request(prompt=prompt, seed=0, max_tokens=max_tokens, temperature=0.0, top_p=1.0)
    stream = client.stream(secrets.token_hex(8), triton_inputs(request))
    ids = _until_end([id async for response in stream for id in response.ids], tokenizer)
    detokenizer = IncrementalDetokenizer(tokenizer)
    return Answer(ids, detokenizer.decode(ids) + detokenizer.flush())


def _until_end(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Return the ids before the end token. Some engines send it, and others do not."""
    end_id = tokenizer.eos_token_id
    return ids[: ids.index(end_id)] if end_id in ids else ids


class Reference:
    """A model of Hugging Face's, in this process."""

    def __init__(self, model: str, tokenizer: Tokenizer, dtype: str, max_tokens: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        load: Any = partial(AutoModelForCausalLM.from_pretrained, trust_remote_code=False)
        self._model = load(model, dtype=dtype).to(self._device).requires_grad_(False)
        self._tokenizer: Any = tokenizer
        if tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = tokenizer.eos_token
        # Greedy, whatever the model's files say of sampling and penalties.
        self._model.generation_config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )

    def answers(self, prompts: Sequence[str], batch_size: int) -> list[Answer]:
        """Complete the prompts.

        Padding is masked; in half precision it can still change a token, so a batch of 1 is the most exact.
        """
        answers: list[Answer] = []
        for batch in in_batches(prompts, batch_size, "Hugging Face"):
            padded = self._tokenizer(batch, padding=True, padding_side="left", return_tensors="pt")
            inputs = {
                name: padded[name].to(self._device) for name in ("input_ids", "attention_mask")
            }
            width = inputs["input_ids"].shape[1]
            for row in self._model.generate(**inputs)[:, width:].tolist():
                ids = _until_end(row, self._tokenizer)
                answers.append(Answer(ids, self._tokenizer.decode(ids, skip_special_tokens=True)))
        return answers

    def log_probs(self, prompt: str, ids: Sequence[int]) -> list[float]:
        """Return the log probability of each output token, given the prompt and those before it."""
        import torch

        prompt_ids = self._tokenizer(prompt).input_ids
        tokens = torch.tensor([[*prompt_ids, *ids]], device=self._device)
        logits = self._model(input_ids=tokens).logits[0, len(prompt_ids) - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(1, tokens[0, len(prompt_ids) :, None])
        return list(chosen[:, 0].tolist())
