"""The model's files: from what the settings name to directories on this machine, and the model's names."""

import logging
from collections.abc import Sequence
from pathlib import Path

from cog_triton.errors import ConfigurationError
from cog_triton.redaction import name_of_url, shown_url, without_archive_suffix
from cog_triton.settings import Settings
from cog_triton.weights import gguf, hub
from cog_triton.weights.managed import Managed, Role, declares_weights, engine_in, managed_weights

logger = logging.getLogger("cog_triton.deployment")


def with_files(settings: Settings) -> Settings:
    """Return the settings with the model and the tokenizer downloaded and unpacked."""
    settings = with_managed_weights(settings, log=True)
    source = settings.weights
    if source is None and settings.engine_dir is None and not Path(settings.model).is_dir():
        source = settings.model
        if _looks_like_path(source) and not Path(source).expanduser().exists():
            raise ConfigurationError(f"MODEL={shown_url(source)} does not exist")
    model_file = local_gguf(settings, source)
    if model_file is not None:
        settings = with_converted_gguf(settings, model_file)
    elif source is not None:
        directory = fetched(settings, source, settings.weights_checksum)
        model_file = gguf.gguf_file(directory)
        if model_file is not None:
            directory = gguf.converted(model_file, settings.weights_cache, settings.dtype)
        engine = engine_in(directory)
        placed = {"model": str(directory)} if engine is None else {"engine_dir": engine}
        settings = settings.model_copy(update=placed)
    name = settings.tokenizer_dir
    if not Path(name).is_dir() and hub.HUB_ID.fullmatch(name):
        # Triton's models load the tokenizer as well, and get no token to download it.
        directory = hub.fetch_from_hub(name, settings.hub_token, hub.WEIGHTS)
        settings = settings.model_copy(update={"tokenizer": str(directory)})
    return settings


def _looks_like_path(source: str) -> bool:
    """Return whether a source is meant as a path, and not as a URL or the id of a model in a hub."""
    if "://" in source:
        return False
    if source.startswith((".", "/", "models/")):
        return True
    return source.count("/") > 1 and hub.HUB_ID.fullmatch(source) is None


def with_managed_weights(
    settings: Settings, managed: Sequence[Managed] | None = None, *, log: bool = False
) -> Settings:
    """Return the settings with the weights that Cog mounts, where no variable names a model.

    COG_WEIGHTS, MODEL and ENGINE_DIR take the place of a mounted model and engine, TOKENIZER that of a
    mounted tokenizer.
    """
    named = {"weights", "model", "engine_dir"} & settings.model_fields_set
    if named:
        variables = [str(type(settings).model_fields[name].alias) for name in sorted(named)]
        if log and declares_weights():
            logger.info(
                "using the model of %s, not the weights that Cog mounts", ", ".join(variables)
            )
        return settings
    mounted = managed_weights() if managed is None else managed
    chosen: dict[Role, Managed] = {}
    for weights in mounted:
        if weights.role is None:
            logger.warning("%s contains no model, engine or tokenizer", weights.directory)
        elif weights.role in chosen:
            logger.warning(
                "the weights %s are not used, because %s comes first in cog.yaml; set MODEL or ENGINE_DIR "
                "to use them",
                weights.name,
                chosen[weights.role].name,
            )
        else:
            chosen[weights.role] = weights
    placed: dict[str, object] = {}
    if Role.ENGINE in chosen:
        placed["engine_dir"] = engine_in(chosen[Role.ENGINE].directory)
    if Role.MODEL in chosen:
        placed["model"] = str(chosen[Role.MODEL].directory)
    if Role.TOKENIZER in chosen and settings.tokenizer is None:
        placed["tokenizer"] = str(chosen[Role.TOKENIZER].directory)
    if log:
        for role, weights in chosen.items():
            logger.info(
                "using the weights %s, which Cog mounts at %s, as the %s",
                weights.name,
                weights.directory,
                role.value,
            )
    return settings.model_copy(update=placed)


def local_gguf(settings: Settings, source: str | None) -> Path | None:
    """Return the GGUF file that the settings name by its path or its directory; None if they do not."""
    if source is None and settings.engine_dir is not None:
        return None
    name = settings.model if source is None else source
    if "://" in name:
        return None
    return gguf.gguf_file(Path(name).expanduser())


def with_converted_gguf(settings: Settings, file: Path) -> Settings:
    """Return the settings with the directory that a GGUF file is converted to as the model."""
    if settings.weights_checksum is not None:
        raise ConfigurationError(
            f"WEIGHTS_SHA256 is not supported for local GGUF files such as {file}; unset it"
        )
    directory = gguf.converted(file, settings.weights_cache, settings.dtype)
    return settings.model_copy(update={"model": str(directory)})


def fetched(settings: Settings, source: str, checksum: str | None = None) -> Path:
    """Return the local directory or GGUF file of a source; see ``cog_triton.weights.cache.fetch``."""
    # Here, because it imports httpx and more, which few setups need.
    from cog_triton.weights.cache import fetch

    cache = settings.weights_cache.expanduser()
    return fetch(source, cache=cache, checksum=checksum, token=settings.hub_token)


def served_names(settings: Settings, otherwise: str | None = None) -> tuple[str, ...]:
    """Return the model's names in requests, the first that of answers: by default its own name."""
    names = tuple(name.strip() for name in settings.served_model_name.split(",") if name.strip())
    return names or (otherwise or model_name(settings),)


def model_name(settings: Settings) -> str:
    """Return the model's name: an id of a hub as it is, or the last part of a path or a URL.

    It is in answers, metrics and traces, so nothing else of a URL is in it: that may be a signature.
    """
    settings = with_managed_weights(settings)
    source = settings.weights or settings.model
    if settings.engine_dir is not None and not settings.weights:
        source = str(settings.engine_dir)
    if "://" in source:
        return name_of_url(source)
    if Path(source).exists() or source.startswith(("/", ".")):
        return without_archive_suffix(Path(source.rstrip("/")).name)
    return shown_url(source)
