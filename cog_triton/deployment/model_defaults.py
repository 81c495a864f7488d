"""What a model's files say of its requests: end tokens and sampling parameters."""

import logging
from pathlib import Path

from cog_triton.adapters.directory import adapter_names
from cog_triton.deployment.engine_choice import EngineName
from cog_triton.deployment.template_variables import Values, merge, own_preprocessing
from cog_triton.errors import ConfigurationError
from cog_triton.settings import Settings
from cog_triton.text.end_tokens import EndTokens, end_ids, tokenizer_end_id
from cog_triton.text.sampling_defaults import sampling_defaults
from cog_triton.text.tokenizer import vocabulary_size

logger = logging.getLogger("cog_triton.deployment")

# Sampling parameters that an engine refuses, or that some of its releases refuse.
_NOT_HONOURED: dict[EngineName, tuple[str, ...]] = {
    "tensorrtllm": ("min_p",),
    "llmapi": ("min_p", "repetition_penalty"),
    "simulated": ("min_p",),
}


def end_tokens_of(
    settings: Settings, values: Values, engine: EngineName, eos_token_id: int | None
) -> EndTokens:
    """Return the end tokens of the deployment that the template variables describe.

    Args:
        eos_token_id: the tokenizer's end of sequence.
    """
    llm = values["tensorrt_llm"]
    preprocessing = values["preprocessing"]
    configured = settings.end_ids or listed_ids(preprocessing.get("end_ids"))
    model = llm.get("engine_dir" if engine == "tensorrtllm" else "model")
    tokenizer_dir = str(preprocessing.get("tokenizer_dir") or settings.tokenizer_dir)
    directories = [Path(str(directory)) for directory in (model, tokenizer_dir) if directory]
    # The simulated engine has no model: it makes the tokenizer's ids, whatever they are.
    vocabulary = None if engine == "simulated" else vocabulary_size(str(directories[0]))
    ids = end_ids(configured, directories, eos_token_id, vocabulary)
    # NVIDIA's preprocessing knows only the tokenizer's.
    return EndTokens(ids, named_in_requests=bool(ids) and not own_preprocessing(settings))


def warn_of_adapters(settings: Settings, end_tokens: EndTokens) -> None:
    """Log the adapters whose tokenizers end a text with a token that does not end an output here.

    The tokenizer and the end tokens are the model's for all adapters.
    """
    for name in adapter_names(settings.lora_dir):
        try:
            ends_with = tokenizer_end_id(Path(str(settings.lora_dir)) / name)
        except (LookupError, TypeError, ValueError):
            # The adapter has no tokenizer, as is usual, or one that does not say.
            continue
        if ends_with is not None and ends_with not in end_tokens.ids:
            ends = ",".join(map(str, (*end_tokens.ids, ends_with)))
            logger.warning(
                "the tokenizer of adapter %s ends texts with token %d, which is not an end token of the "
                "model; to add it, set END_ID=%s",
                name,
                ends_with,
                ends,
            )


def with_end_tokens(
    settings: Settings, values: Values, engine: EngineName, end_tokens: EndTokens
) -> Values:
    """Return the template variables with the end tokens for the models that read them."""
    if not end_tokens.ids or not own_preprocessing(settings):
        return values
    if engine == "tensorrtllm" and len(end_tokens.ids) > 1:
        others = ", ".join(map(str, end_tokens.ids[1:]))
        logger.info(
            "TensorRT-LLM's C++ backend supports one end token, %d; the others (%s) are passed as stop "
            "words, which can end an output before min_tokens",
            end_tokens.ids[0],
            others,
        )
    variable: dict[str, object] = {"end_ids": list(end_tokens.ids)}
    added: Values = {"preprocessing": variable}
    if engine != "tensorrtllm":
        added["tensorrt_llm"] = variable
    return merge(values, added)


def sampling_defaults_of(settings: Settings, engine: EngineName) -> dict[str, float]:
    """Return the model's recommended sampling parameters, as far as the engine honours them."""
    if settings.generation_defaults == "none":
        return {}
    directories = [settings.tokenizer_dir]
    if settings.engine_dir is None and "model" in settings.model_fields_set:
        directories.insert(0, settings.model_dir)
    defaults = sampling_defaults(directories)
    for name in _NOT_HONOURED.get(engine, ()):
        if defaults.pop(name, None) is not None:
            logger.warning(
                "%s in the model's generation_config.json has no effect with ENGINE=%s",
                name,
                engine,
            )
    return defaults


def listed_ids(value: object) -> tuple[int, ...]:
    """Return the ids of a template variable, a list or a text; ConfigurationError if they are none."""
    numbers = value if isinstance(value, list) else str(value or "").split(",")
    try:
        return tuple(int(number) for number in numbers if str(number).strip())
    except (TypeError, ValueError):
        raise ConfigurationError(f"end_ids must be a list of token ids, not {value!r}") from None
