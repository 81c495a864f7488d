"""The Cog predictor: inputs to a request, chunks to the output.

``cog build`` reads this file without running it, so decorators, types and defaults are literals.
"""

import asyncio
import gc
import inspect
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Optional

import cog
from cog import BaseRunner, ConcatenateIterator, Input

from cog_triton.api.cog import live_stream
from cog_triton.api.cog.passage import Inputs
from cog_triton.deployment import Deployment
from cog_triton.errors import InvalidParameter
from cog_triton.processes import end_with_parent, without_collections
from cog_triton.protocol.parameters import parse_logit_bias
from cog_triton.request.guide import choose_guide
from cog_triton.request.limits import parse_json, parse_stop_sequences
from cog_triton.request.request import Request, check_sampling, resolve_seed, resolve_tokens
from cog_triton.server.log import log_to
from cog_triton.settings import read_settings
from cog_triton.text.chat import format_prompt, render_chat, validate_template
from cog_triton.web.bodies import off_loop

logger = logging.getLogger("cog_triton.predict")

# Time for Cog to forward the last lines of the log. Without it, 17 of 48 failed starts lost a line (six at
# a time on two cores); with 0.02 s, none of 48 did.
_FORWARDING_SECONDS = 0.25


def described_prompts(deployment: Deployment) -> str:
    """Return a log line that says how prompts are formatted."""
    if deployment.chat_template_for_prompts:
        return (
            "prompts go through the model's chat template, as a user message; "
            "prompt_template={prompt} sends a prompt unchanged"
        )
    template = deployment.settings.prompt_template
    if template is None or template == "{prompt}":
        return "prompts go to the model unchanged, without a chat template"
    return "prompts go through PROMPT_TEMPLATE, not through a chat template"


class Predictor(BaseRunner):
    async def setup(self, weights: Optional[str] = None) -> None:
        try:
            await self._set_up(weights)
        except Exception:
            # Cog's server forwards no more of the log once it knows that the setup failed, and the
            # last lines may say why.
            await asyncio.sleep(_FORWARDING_SECONDS)
            raise

    async def _set_up(self, weights: str | None) -> None:
        settings = read_settings()
        log_to(settings.log_level)
        if weights:
            settings = settings.model_copy(update={"weights": weights})
        # Refuse them before anything is started.
        if settings.prompt_template is not None:
            validate_template(settings.prompt_template)
        check_sampling({"stop_sequences": parse_stop_sequences(settings.stop_sequences)})
        end_with_parent()
        beside = None
        if settings.openai_port is not None:
            with without_collections():
                from cog_triton.api.openai.server import Embedded

            beside = Embedded(settings, lambda busy: live_stream.tell("busy" if busy else "idle"))
            settings = beside.settings
        self.deployment = await Deployment.start(settings)
        logger.info(described_prompts(self.deployment))
        handlers: dict[str, Callable[..., object]] = {"stop": self.deployment.close}
        if beside is not None:
            beside.serve(self.deployment)
            handlers["drain"] = beside.drain
        inputs = Inputs(
            needed=("prompt", "messages"),
            names=tuple(inspect.signature(self.predict).parameters),
            limits=self.deployment.limits,
        )
        live_stream.listen(handlers, inputs)
        # What is alive now stays so: a full collection would go through all of it.
        gc.collect()
        gc.freeze()

    @cog.streaming
    @cog.concurrent(max=512)
    async def predict(
        self,
        prompt: Optional[str] = Input(
            description="Prompt to send to the model. Either this or messages is required.",
            default=None,
        ),
        system_prompt: str = Input(
            description="System prompt, inserted where the template expects it, or before the messages.",
            default="",
        ),
        max_tokens: int = Input(
            description="Maximum number of tokens to generate; a word is usually one or two tokens.",
            ge=1,
            default=512,
        ),
        min_tokens: Optional[int] = Input(
            description="Minimum number of tokens to generate; -1 means none.", ge=-1, default=None
        ),
        temperature: float = Input(
            description="Sampling temperature; 0 always takes the most likely token.",
            ge=0,
            le=5,
            default=0.7,
        ),
        top_p: float = Input(
            description="Sample from the most likely tokens whose probabilities add up to top_p.",
            ge=0,
            le=1,
            default=0.95,
        ),
        top_k: int = Input(
            description="Sample from the k most likely tokens; 0 or -1 means all.", ge=-1, default=0
        ),
        stop_sequences: Optional[str] = Input(
            description="Comma-separated texts that end the output; write \\, for a literal comma.",
            default=None,
        ),
        length_penalty: float = Input(
            description="Values above 1 favor longer outputs in beam search.",
            ge=0,
            le=5,
            default=1.0,
        ),
        presence_penalty: float = Input(
            description="Values above 0 make tokens already in the output less likely.", default=0.0
        ),
        seed: Optional[int] = Input(
            description="The same seed gives the same output, up to rounding. Unset or -1: random.",
            ge=-1,
            le=18446744073709551615,
            default=None,
        ),
        prompt_template: Optional[str] = Input(
            description="Template with {prompt} and {system_prompt}, used instead of the chat template.",
            default=None,
        ),
        log_performance_metrics: bool = Input(
            description="Log token counts and timings of this prediction.", default=False
        ),
        max_new_tokens: Optional[int] = Input(
            description="Deprecated name of max_tokens.", ge=1, default=None
        ),
        min_new_tokens: Optional[int] = Input(
            description="Deprecated name of min_tokens.", ge=-1, default=None
        ),
        messages: Optional[str] = Input(
            description="Chat to use instead of prompt: a JSON list of objects with role and content.",
            default=None,
        ),
        tools: Optional[str] = Input(
            description="Functions that the model may call: a JSON list in OpenAI's format.",
            default=None,
        ),
        chat_template_kwargs: Optional[str] = Input(
            description="Variables for the chat template: a JSON object.", default=None
        ),
        repetition_penalty: float = Input(
            description="Values above 1 make tokens of the prompt and output less likely.",
            default=1.0,
        ),
        frequency_penalty: float = Input(
            description="Values above 0 make tokens less likely each time they occur.", default=0.0
        ),
        min_p: float = Input(
            description="Minimum probability of a token, relative to the most likely token's.",
            ge=0,
            le=1,
            default=0.0,
        ),
        bad_words: Optional[str] = Input(
            description="Comma-separated texts to avoid; write \\, for a literal comma.",
            default=None,
        ),
        logit_bias: Optional[str] = Input(
            description="JSON object that maps token ids to values added to their logits.",
            default=None,
        ),
        ignore_eos: bool = Input(
            description="Ignore the end token and continue up to max_tokens.", default=False
        ),
        json_schema: Optional[str] = Input(
            description="JSON schema that the output must follow.", default=None
        ),
        regex: Optional[str] = Input(
            description="Regular expression that the output must match.", default=None
        ),
        grammar: Optional[str] = Input(
            description="EBNF grammar that the output must follow.", default=None
        ),
        choice: Optional[str] = Input(
            description="JSON list of texts, one of which is the output.", default=None
        ),
        lora: str = Input(
            description="Name of the LoRA adapter to use; empty means none.",
            default="",
        ),
    ) -> ConcatenateIterator[str]:
        # Called in the generator, so that a refusal ends the prediction as any error does.
        def request() -> Request:
            settings = self.deployment.settings
            system = system_prompt or settings.system_prompt
            if messages is None:
                _refuse("needs messages", tools=tools, chat_template_kwargs=chat_template_kwargs)
                text, is_chat = self._prompt(prompt, system, prompt_template)
            else:
                why = "and messages cannot be combined"
                # The template {prompt} sends a text unchanged, and so changes nothing here.
                has_template = bool(prompt_template) and prompt_template != "{prompt}"
                _refuse(why, prompt=prompt, prompt_template=has_template)
                text = self._chat(messages, system, tools, chat_template_kwargs)
                is_chat = True
            stops = settings.stop_sequences if stop_sequences is None else stop_sequences
            return Request(
                prompt=text,
                # A rendered chat has them.
                add_special_tokens=False if is_chat else None,
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
                seed=resolve_seed(seed, draws=self.deployment.draws_seeds),
                stop_sequences=parse_stop_sequences(stops),
                pad_id=settings.pad_id,
            )

        texts = [prompt, system_prompt, messages, tools, chat_template_kwargs, prompt_template]
        texts += [logit_bias, bad_words, stop_sequences, json_schema, regex, grammar, choice]
        size = sum(len(text) for text in texts if text is not None)
        log = log_performance_metrics or self.deployment.settings.log_performance_metrics
        return live_stream.live(self._answer(request, size, log))

    async def healthcheck(self) -> bool:
        return await self.deployment.healthy()

    def _prompt(self, prompt: str | None, system: str, template: str | None) -> tuple[str, bool]:
        """Return the text that the model gets, and whether the chat template made it.

        That is used for one message of a user where neither the request nor PROMPT_TEMPLATE has a template.
        """
        limits = self.deployment.limits
        template = template or self.deployment.settings.prompt_template
        if template or not self.deployment.chat_template_for_prompts:
            return format_prompt(template or "{prompt}", prompt, system, limits), False
        turns = [{"role": "user", "content": format_prompt("{prompt}", prompt, limits=limits)}]
        if system:
            turns.insert(0, {"role": "system", "content": system})
        return render_chat(self.deployment.tokenizer, turns, limits=limits), True

    def _chat(self, messages: str, system: str, tools: str | None, kwargs: str | None) -> str:
        """Make a prompt of messages, with a system prompt before them unless they begin with one."""
        turns = parse_json("messages", messages, list)
        if turns and system and turns[0].get("role") not in ("system", "developer"):
            turns.insert(0, {"role": "system", "content": system})
        return render_chat(
            self.deployment.tokenizer,
            turns,
            limits=self.deployment.limits,
            tools=parse_json("tools", tools or "[]", list),
            kwargs=parse_json("chat_template_kwargs", kwargs or "{}", dict),
        )

    async def _answer(
        self, make: Callable[[], Request], size: int, log: bool
    ) -> AsyncGenerator[str, None]:
        """Yield the pieces of an answer; then record its metrics, and print them to the log.

        The request is made of texts with so many characters; of many, beside the event loop.
        """
        request = await off_loop(size, make)
        seed = "none: the engine draws at random (set the input seed to fix it)"
        print(f"Random seed used: {seed if request.seed is None else request.seed}")
        start = time.perf_counter()
        first = 0.0
        try:
            async for chunk in self.deployment.generate(request):
                if not first and chunk.output_tokens:
                    first = time.perf_counter()
                if chunk.text:
                    yield chunk.text
        except BaseException as error:
            cancelled = isinstance(error, (asyncio.CancelledError, GeneratorExit))
            self.record_metric("finish_reason", "cancelled" if cancelled else "error")
            raise
        metrics: dict[str, float | str | None] = {
            "output_token_count": chunk.output_tokens,
            "finish_reason": chunk.finish_reason,
            "queue_time": chunk.queued,
            "input_token_count": chunk.input_tokens,
        }
        if first:
            metrics["time_to_first_token"] = first - start
            metrics["tokens_per_second"] = chunk.output_tokens / (time.perf_counter() - start)
        for name, value in metrics.items():
            if value is not None:
                self.record_metric(name, value)
                if log:
                    print(f"{name}: {value}")


def _refuse(why: str, **inputs: object) -> None:
    for name, value in inputs.items():
        if value:
            raise InvalidParameter(f"{name} {why}")
