from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class SamplingParams:
    """How to sample. None means the runtime's default; with no field set, decoding is greedy."""

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad: str | list[str] | None = None
    bad_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guided_decoding: object | None = None
    ignore_eos: bool = False
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p must be within 0 and 1, got {self.top_p}")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"top_k must not be negative, got {self.top_k}")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"temperature must not be negative, got {self.temperature}")

    @property
    def _greedy(self) -> bool:
        given = (self.temperature, self.top_k, self.top_p)
        nothing = all(value is None for value in given)
        return nothing or self.top_k == 1 or self.top_p == 0 or self.temperature == 0
