"""The line that a start prints: what is served, by what, and how its answers begin and end."""

import json
import logging
import math
import struct
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cog_triton.server.devices import torch_for_cpus
from cog_triton.server.log import GPU
from cog_triton.settings import Settings
from cog_triton.text.chat import has_chat_template
from cog_triton.text.end_tokens import EndTokens
from cog_triton.text.tokenizer import Tokenizer

# The command line shows this logger's lines for good; see cog_triton/terminal/serving.py.
logger = logging.getLogger(__name__)

# A file that only the demo model has.
DEMO_MANIFEST = "demo.json"
LISTED_END_TOKENS = 8
# The prompt template that changes nothing.
RAW_PROMPT = "{prompt}"
# The limit in bytes that safetensors itself has.
LONGEST_HEADER = 100_000_000
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
_NUMBERS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Engines that run the model's checkpoint, so that its files say what is computed.
_RUN_CHECKPOINTS = ("transformers", "vllm", "llmapi")


@dataclass(frozen=True)
class Checkpoint:
    """What the files of a model say of it; None where they do not."""

    family: str | None = None
    parameters: int | None = None
    dtype: str | None = None
    quantization: str | None = None


@dataclass(frozen=True)
class Served:
    """What a deployment serves, for people."""

    name: str
    engine: str
    checkpoint: Checkpoint = Checkpoint()
    device: str | None = None
    dtype: str | None = None
    context_length: int | None = None
    end_tokens: tuple[str, ...] = ()
    template: str = "no chat template"
    is_demo: bool = False

    def line(self) -> str:
        """Return it as one line."""
        about = ["toy demo model"] if self.is_demo else []
        if self.checkpoint.family:
            about.append(self.checkpoint.family)
        if self.checkpoint.parameters:
            about.append(f"{rounded(self.checkpoint.parameters)} parameters")
        if self.checkpoint.quantization:
            about.append(f"quantized by {self.checkpoint.quantization}")
        model = f"{self.name} ({', '.join(about)})" if about else self.name
        runs = ", ".join(filter(None, (self.engine, self.device, self.dtype)))
        context = "context length known only to the engine"
        if self.context_length is not None:
            context = f"context {self.context_length:,}"
        ends = "ends only at max_tokens"
        if self.end_tokens:
            ends = f"ends at {', '.join(self.end_tokens[:LISTED_END_TOKENS])}"
            more = len(self.end_tokens) - LISTED_END_TOKENS
            if more > 0:
                ends += f" and {more} more"
        return f"serving {model} on {runs}; {context}; {ends}; {self.template}"


def served(
    name: str,
    engine: str,
    variables: Mapping[str, object],
    tokenizer: Tokenizer,
    end_tokens: EndTokens,
    *,
    context_length: int | None,
    template: str,
) -> Served:
    """Return what a deployment serves.

    Args:
        variables: of the model tensorrt_llm.
        template: what ``template_of`` says.
    """
    directory = variables.get("engine_dir" if engine == "tensorrtllm" else "model")
    checkpoint_directory = Path(str(directory))
    checkpoint = read_checkpoint(checkpoint_directory)
    # This engine uses only the tokenizer of the model.
    if engine == "simulated":
        checkpoint = Checkpoint()
    return Served(
        name,
        engine,
        checkpoint,
        device=device_of(engine, variables),
        dtype=dtype_of(engine, variables, checkpoint),
        context_length=context_length,
        end_tokens=texts_of(end_tokens, tokenizer),
        template=template,
        is_demo=engine != "simulated" and is_demo_model(checkpoint_directory),
    )


def is_demo_model(directory: Path) -> bool:
    """Return whether a directory holds the demo model that comes with the package."""
    return (directory / DEMO_MANIFEST).is_file()


def device_of(engine: str, variables: Mapping[str, object]) -> str | None:
    """Return where an engine computes; None for the simulated one, which does not."""
    if engine == "simulated":
        return None
    if engine in ("tensorrtllm", "llmapi"):
        return "cuda"
    device = str(variables.get("device") or "auto")
    if engine == "transformers" and device != "auto":
        return device
    return "cuda" if GPU and torch_for_cpus() is None else "cpu"


def dtype_of(engine: str, variables: Mapping[str, object], checkpoint: Checkpoint) -> str | None:
    """Return the type of an engine's numbers; None where only the engine knows it."""
    if engine == "simulated":
        return None
    dtype = str(variables.get("dtype") or "auto")
    if engine in _RUN_CHECKPOINTS and dtype != "auto":
        return dtype
    return checkpoint.dtype


def texts_of(end_tokens: EndTokens, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the texts of end tokens, or the ids of those that the tokenizer does not have."""
    texts = []
    for token in end_tokens.ids:
        text: Any = None
        # A tokenizer that comes with a model may raise anything.
        with suppress(Exception):
            text = tokenizer.convert_ids_to_tokens(token)
        texts.append(text if isinstance(text, str) and text else str(token))
    return tuple(texts)


def template_of(settings: Settings, tokenizer: Tokenizer) -> str:
    """Return what is made of messages and, where that is something else, of prompts."""
    if not has_chat_template(tokenizer):
        messages = "no chat template"
    elif settings.chat_template is not None:
        messages = "chat template from CHAT_TEMPLATE"
    else:
        messages = "chat template from the tokenizer"
    if uses_chat_template_for_prompts(settings, tokenizer):
        return messages
    if settings.prompt_template not in (None, RAW_PROMPT):
        return f"{messages} for messages, PROMPT_TEMPLATE for prompts"
    if has_chat_template(tokenizer):
        return f"{messages} for messages, prompts unchanged"
    return f"{messages}, prompts unchanged"


def uses_chat_template_for_prompts(settings: Settings, tokenizer: Tokenizer) -> bool:
    """Return whether a prompt of Cog's API becomes a user's message, unless its request has a template.

    The demo model was trained on questions as they are, too, and the pages show its answers to these.
    """
    if settings.prompt_template is not None:
        return False
    return has_chat_template(tokenizer) and not is_demo_model(Path(settings.tokenizer_dir))


def read_checkpoint(directory: Path) -> Checkpoint:
    """Return what the files of a checkpoint or an engine say; a file that cannot be read says nothing."""
    config = _read_object(directory / "config.json")
    engine = config.get("pretrained_config")
    if isinstance(engine, dict):
        quantization = _mapping(engine.get("quantization"))
        return Checkpoint(
            family=_text(engine.get("architecture")),
            dtype=_text(engine.get("dtype")),
            quantization=_text(quantization.get("quant_algo")),
        )
    method = _mapping(config.get("quantization_config")).get("quant_method")
    numbers = count_numbers(directory)
    inner = _mapping(config.get("text_config"))
    named = (part.get(key) for part in (config, inner) for key in ("dtype", "torch_dtype"))
    dtype = next((_text(value) for value in named if _text(value)), None)
    stored = max(numbers, key=lambda kind: numbers[kind], default=None)
    return Checkpoint(
        family=_text(config.get("model_type")),
        # Several quantized numbers share one that is stored.
        parameters=None if method else sum(numbers.values()) or None,
        dtype=dtype or _NUMBERS.get(stored or ""),
        quantization=_text(method),
    )


def count_numbers(directory: Path) -> Counter[str]:
    """Return how many numbers the safetensors files of a directory hold, by their types."""
    numbers: Counter[str] = Counter()
    for file in sorted(directory.glob("*.safetensors")):
        with suppress(OSError, ValueError, LookupError, TypeError, struct.error):
            with file.open("rb") as opened:
                (length,) = struct.unpack("<Q", opened.read(8))
                header = json.loads(opened.read(min(length, LONGEST_HEADER)))
            for name, tensor in header.items():
                if name != "__metadata__":
                    numbers[tensor["dtype"]] += math.prod(tensor["shape"])
    return numbers


def rounded(number: int) -> str:
    """Return a number of parameters as people say it: 135M, 1.24B, 8.03B."""
    for unit, letter in _UNITS:
        if number >= unit:
            value = number / unit
            return f"{value:.0f}{letter}" if value >= 100 else f"{value:.3g}{letter}"
    return str(number)


def _read_object(file: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        content = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    return {}


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str | None:
    return value.removeprefix("torch.") if isinstance(value, str) and value else None
