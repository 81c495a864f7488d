from dataclasses import dataclass


@dataclass(kw_only=True)
class SamplingParams:
    """How to sample. None means the runtime's default; with no field set, decoding is greedy."""

    end_id: int | None = None
    pad_id: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    max_tokens: int = 32
    bad_token_ids: list[int] | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p must be within 0 and 1, got {self.top_p}")
