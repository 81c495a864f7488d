"""The Cog face: inputs → request, chunks → output.

``cog build`` reads this file without running it, so decorators, types and defaults are literals.
"""

import contextvars
import gc
import time
from collections.abc import AsyncGenerator, Generator
from typing import Optional

import cog
from cog import BaseRunner, ConcatenateIterator, Input

from cog_triton.deployment import Deployment
from cog_triton.faces.cog import last_call, live_stream
from cog_triton.generation import Chunk
from cog_triton.limits import check_stop_sequences
from cog_triton.parent import end_with_parent
from cog_triton.request import Request, new_seed, resolve_max_tokens, resolve_min_tokens
from cog_triton.server.log import log_to
from cog_triton.settings import Settings, read_settings
from cog_triton.text.prompts import format_prompt, validate_template
from cog_triton.text.stop_sequences import parse_stop_sequences

DEFAULT_PROMPT_TEMPLATE = "{prompt}"

live_stream.install()


class Predictor(BaseRunner):
    async def setup(self, weights: Optional[str] = None) -> None:  # noqa: UP045
        settings = read_settings()
        log_to(settings.log_level)
        if weights:
            settings = settings.model_copy(update={"weights": weights})
        validate_template(settings.prompt_template)
        check_stop_sequences(parse_stop_sequences(settings.stop_sequences))
        end_with_parent()
        self.deployment = await Deployment.start(settings)
        last_call.listen(self.deployment.close)
        # What is alive now stays so: a full collection would go through all of it.
        gc.collect()
        gc.freeze()

    @cog.streaming
    @cog.concurrent(max=512)
    async def predict(
        self,
        prompt: str = Input(description="Prompt to send to the model."),
        system_prompt: str = Input(
            description="System prompt; where it goes is up to the prompt template.", default=""
        ),
        max_tokens: int = Input(
            description="Most tokens to generate. A word is generally 2-3 tokens.",
            ge=1,
            default=512,
        ),
        min_tokens: Optional[int] = Input(  # noqa: UP045
            description="Fewest tokens to generate; -1 for no minimum.", ge=-1, default=None
        ),
        temperature: float = Input(
            description="Randomness of the output: 0 always takes the most likely token.",
            ge=0,
            le=5,
            default=0.7,
        ),
        top_p: float = Input(
            description="Sample from the most likely tokens that reach this probability together.",
            ge=0,
            le=1,
            default=0.95,
        ),
        top_k: int = Input(
            description="Sample from so many most likely tokens; 0 or -1 for all.", ge=-1, default=0
        ),
        stop_sequences: Optional[str] = Input(  # noqa: UP045
            description="Comma-separated texts that end the output; they are no part of it. "
            "A comma in one is written \\,",
            default=None,
        ),
        length_penalty: float = Input(
            description="Below 1 favours shorter, above 1 longer outputs in beam search.",
            ge=0,
            le=5,
            default=1.0,
        ),
        presence_penalty: float = Input(
            description="Above 0 makes tokens that the output already has less likely.", default=0.0
        ),
        seed: Optional[int] = Input(  # noqa: UP045
            description="The same seed and inputs give the same output. Unset for a random seed.",
            ge=0,
            default=None,
        ),
        prompt_template: str = Input(
            description="Template of the model's prompt, with {prompt} and, if wanted, "
            "{system_prompt}. A literal brace is doubled.",
            default="{prompt}",
        ),
        log_performance_metrics: bool = Input(
            description="Log token counts and times of this prediction.", default=False
        ),
        max_new_tokens: Optional[int] = Input(  # noqa: UP045
            description="Old name of max_tokens.", ge=1, default=None
        ),
        min_new_tokens: Optional[int] = Input(  # noqa: UP045
            description="Old name of min_tokens.", ge=-1, default=None
        ),
    ) -> ConcatenateIterator[str]:
        settings = self.deployment.settings
        request = Request(
            prompt=format_prompt(
                _template(settings, prompt_template),
                prompt,
                system_prompt or settings.system_prompt,
                self.deployment.limits,
            ),
            max_tokens=resolve_max_tokens(max_tokens, max_new_tokens),
            min_tokens=resolve_min_tokens(min_tokens, min_new_tokens),
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            length_penalty=length_penalty,
            presence_penalty=presence_penalty,
            seed=new_seed() if seed is None else seed,
            stop_sequences=parse_stop_sequences(
                settings.stop_sequences if stop_sequences is None else stop_sequences
            ),
            end_id=settings.end_id,
            pad_id=settings.pad_id,
        )
        print(f"Random seed used: {request.seed}")
        measurements = Measurements()
        texts = live_stream.live(_texts(self.deployment, request, measurements))
        return self._answer(
            texts,
            measurements,
            # What is printed or recorded belongs to the prediction in whose context that happens, and
            # the generator runs outside of it.
            contextvars.copy_context(),
            log_performance_metrics or settings.log_performance_metrics,
        )

    async def healthcheck(self) -> bool:
        return await self.deployment.healthy()

    def _answer(
        self,
        texts: Generator[str, None, None],
        measurements: "Measurements",
        context: contextvars.Context,
        log: bool,
    ) -> Generator[str, None, None]:
        yield from texts
        for name, value in measurements.metrics().items():
            context.run(self.record_metric, name, value)
            if log:
                context.run(print, f"{name}: {value}")


class Measurements:
    """What is measured of one prediction, from its start to its last chunk."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._first: float | None = None
        self._last = self._start
        self._chunk: Chunk | None = None

    def add(self, chunk: Chunk) -> None:
        self._last = time.perf_counter()
        self._chunk = chunk
        if self._first is None and chunk.output_tokens:
            self._first = self._last

    def metrics(self) -> dict[str, float]:
        """Token counts; seconds in the queue; seconds from start to first token; output tokens per second,
        start to end.
        """
        if self._chunk is None:
            return {}
        metrics: dict[str, float] = {"output_token_count": self._chunk.output_tokens}
        metrics["queue_time"] = self._chunk.queued
        if self._chunk.input_tokens is not None:
            metrics["input_token_count"] = self._chunk.input_tokens
        if self._first is not None:
            metrics["time_to_first_token"] = self._first - self._start
            metrics["tokens_per_second"] = self._chunk.output_tokens / (self._last - self._start)
        return metrics


async def _texts(
    deployment: Deployment, request: Request, measurements: Measurements
) -> AsyncGenerator[str, None]:
    async for chunk in deployment.generate(request):
        measurements.add(chunk)
        if chunk.text:
            yield chunk.text


def _template(settings: Settings, prompt_template: str) -> str:
    """The request's template; one at its default counts as not given."""
    if prompt_template == DEFAULT_PROMPT_TEMPLATE:
        return settings.prompt_template
    return prompt_template
