"""The Cog face: inputs → request, chunks → output.

``cog build`` reads this file without running it, so decorators, types and defaults are literals.
"""

import contextvars
import gc
import time
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, Optional

import cog
from cog import BaseRunner, ConcatenateIterator, Input

from cog_triton.deployment import Deployment
from cog_triton.errors import InvalidParameter
from cog_triton.faces.cog import live_stream
from cog_triton.processes import end_with_parent
from cog_triton.request.limits import parse_list, parse_object
from cog_triton.request.request import (
    Request,
    choose_guide,
    parse_logit_bias,
    resolve_seed,
    resolve_tokens,
)
from cog_triton.server.log import log_to
from cog_triton.settings import Settings, read_settings
from cog_triton.text.chat import format_prompt, validate_template
from cog_triton.text.stop_sequences import parse_stop_sequences

live_stream.install()


class Predictor(BaseRunner):
    async def setup(self, weights: Optional[str] = None) -> None:
        settings = read_settings()
        log_to(settings.log_level)
        if weights:
            settings = settings.model_copy(update={"weights": weights})
        validate_template(settings.prompt_template)
        # Refuse them before anything is started.
        Request(" ", 0, stop_sequences=parse_stop_sequences(settings.stop_sequences))
        end_with_parent()
        beside, settings = _openai(settings)
        self.deployment = await Deployment.start(settings)
        if beside is not None:
            beside.serve(self.deployment)
        handlers: dict[str, Callable[..., object]] = {"stop": self.deployment.close}
        if beside is not None:
            handlers["drain"] = beside.drain
        live_stream.listen(handlers, inputs=("prompt", "messages"))
        # What is alive now stays so: a full collection would go through all of it.
        gc.collect()
        gc.freeze()

    @cog.streaming
    @cog.concurrent(max=512)
    async def predict(
        self,
        prompt: Optional[str] = Input(
            description="Prompt to send to the model; this or messages is required.", default=None
        ),
        system_prompt: str = Input(
            description="System prompt; where it goes is up to the prompt template, or the first "
            "message if messages have none.",
            default="",
        ),
        max_tokens: int = Input(
            description="Most tokens to generate. A word is generally 2-3 tokens.",
            ge=1,
            default=512,
        ),
        min_tokens: Optional[int] = Input(
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
        stop_sequences: Optional[str] = Input(
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
        seed: Optional[int] = Input(
            description="The same seed and inputs give the same output, but for rounding. Drawn if "
            "unset or -1.",
            ge=-1,
            le=18446744073709551615,
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
        max_new_tokens: Optional[int] = Input(
            description="Old name of max_tokens.", ge=1, default=None
        ),
        min_new_tokens: Optional[int] = Input(
            description="Old name of min_tokens.", ge=-1, default=None
        ),
        messages: Optional[str] = Input(
            description="Chat instead of a prompt: a JSON list of objects with role and content, which "
            "the model's own chat template makes a prompt of.",
            default=None,
        ),
        tools: Optional[str] = Input(
            description="Functions that the model may call: a JSON list in OpenAI's form, for the chat "
            "template.",
            default=None,
        ),
        chat_template_kwargs: Optional[str] = Input(
            description="Switches of the chat template: a JSON object.", default=None
        ),
        repetition_penalty: float = Input(
            description="Above 1 makes tokens that prompt or output already have less likely.",
            default=1.0,
        ),
        frequency_penalty: float = Input(
            description="Above 0 makes tokens less likely each time that the output has them.",
            default=0.0,
        ),
        min_p: float = Input(
            description="Leaves out tokens less likely than so many times the most likely one.",
            ge=0,
            le=1,
            default=0.0,
        ),
        bad_words: Optional[str] = Input(
            description="Comma-separated texts that are not generated. A comma in one is written \\,",
            default=None,
        ),
        logit_bias: Optional[str] = Input(
            description="A JSON object of token ids and what is added to their logits.",
            default=None,
        ),
        ignore_eos: bool = Input(
            description="Go on after the end token, up to max_tokens.", default=False
        ),
        json_schema: Optional[str] = Input(
            description="JSON schema that the output has to follow.", default=None
        ),
        regex: Optional[str] = Input(
            description="Regular expression that the output has to match.", default=None
        ),
        grammar: Optional[str] = Input(
            description="EBNF grammar that the output has to follow.", default=None
        ),
        choice: Optional[str] = Input(
            description="A JSON list of texts, one of which the output has to be.", default=None
        ),
        lora: str = Input(
            description="Name of the LoRA adapter to answer with; empty for the model itself.",
            default="",
        ),
    ) -> ConcatenateIterator[str]:
        settings = self.deployment.settings
        own_template = prompt_template != "{prompt}"  # its default counts as not given
        if messages is None:
            _refuse("needs messages", tools=tools, chat_template_kwargs=chat_template_kwargs)
            template = prompt_template if own_template else settings.prompt_template
            system = system_prompt or settings.system_prompt
            text = format_prompt(template, prompt, system, self.deployment.limits)
        else:
            _refuse("and messages exclude each other", prompt=prompt, prompt_template=own_template)
            text = self._chat(messages, system_prompt, tools, chat_template_kwargs)
        request = Request(
            prompt=text,
            # A rendered chat begins with the tokens that begin a text.
            add_special_tokens=None if messages is None else False,
            max_tokens=resolve_tokens("max", max_tokens, max_new_tokens),
            min_tokens=resolve_tokens("min", min_tokens, min_new_tokens),
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            length_penalty=length_penalty,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            min_p=min_p,
            bad_words=parse_stop_sequences(bad_words, "bad_words"),
            logit_bias=parse_logit_bias(logit_bias),
            ignore_eos=ignore_eos,
            guide=choose_guide(
                json_schema=json_schema, regex=regex, grammar=grammar, choice=choice
            ),
            adapter=lora,
            seed=resolve_seed(seed),
            stop_sequences=parse_stop_sequences(
                settings.stop_sequences if stop_sequences is None else stop_sequences
            ),
            end_id=settings.end_id,
            pad_id=settings.pad_id,
        )
        print(f"Random seed used: {request.seed}")
        metrics: dict[str, float | str] = {}
        texts = live_stream.live(_texts(self.deployment, request, metrics))
        # What is printed or recorded belongs to the prediction in whose context that happens, and the
        # generator runs outside of it.
        context = contextvars.copy_context()
        log = log_performance_metrics or settings.log_performance_metrics
        return self._answer(texts, metrics, context, log)

    async def healthcheck(self) -> bool:
        return await self.deployment.healthy()

    def _chat(
        self, messages: str, system_prompt: str, tools: str | None, kwargs: str | None
    ) -> str:
        """Make a prompt of messages; a system prompt goes before those that begin without one."""
        turns = parse_list("messages", messages)
        system = system_prompt or self.deployment.settings.system_prompt
        if turns and system and turns[0].get("role") not in ("system", "developer"):
            turns.insert(0, {"role": "system", "content": system})
        return self.deployment.chat_prompt(
            turns,
            tools=parse_list("tools", tools or "[]"),
            kwargs=parse_object("chat_template_kwargs", kwargs or "{}"),
        )

    def _answer(
        self,
        texts: Generator[str, None, None],
        metrics: dict[str, float | str],
        context: contextvars.Context,
        log: bool,
    ) -> Generator[str, None, None]:
        try:
            yield from texts
        except BaseException as error:
            ended = "cancelled" if live_stream.is_cancellation(error) else "error"
            context.run(self.record_metric, "finish_reason", ended)
            raise
        for name, value in metrics.items():
            context.run(self.record_metric, name, value)
            if log:
                context.run(print, f"{name}: {value}")


async def _texts(
    deployment: Deployment, request: Request, metrics: dict[str, float | str]
) -> AsyncGenerator[str, None]:
    """Yield the pieces of an answer, and then fill ``metrics`` with its counts and seconds."""
    start, first, chunk = time.perf_counter(), 0.0, None
    async for chunk in deployment.generate(request):
        if not first and chunk.output_tokens:
            first = time.perf_counter()
        if chunk.text:
            yield chunk.text
    if chunk is None:
        return
    metrics["output_token_count"] = chunk.output_tokens
    metrics["finish_reason"] = chunk.finish_reason or ""
    metrics["queue_time"] = chunk.queued
    if chunk.input_tokens is not None:
        metrics["input_token_count"] = chunk.input_tokens
    if first:
        metrics["time_to_first_token"] = first - start
        metrics["tokens_per_second"] = chunk.output_tokens / (time.perf_counter() - start)


def _openai(settings: Settings) -> tuple[Any, Settings]:
    """Make the OpenAI face, if it is to run in this process, and the settings that both need."""
    port = settings.openai_port
    if port is None:
        return None, settings
    from cog_triton.faces.openai.command import Embedded
    from cog_triton.faces.openai.workers import with_fixed_port

    settings = with_fixed_port(settings)

    def tell(busy: bool) -> None:
        live_stream.tell("busy" if busy else "idle")

    return Embedded(settings, port, tell), settings


def _refuse(why: str, **inputs: object) -> None:
    for name, value in inputs.items():
        if value:
            raise InvalidParameter(f"{name} {why}")
