"""The postprocessing model: token ids to text, one response at a time."""

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cog_triton.errors import InvalidParameter
from cog_triton.models import stub
from cog_triton.models.stub import Array, Inputs
from cog_triton.text.detokenizer import decode_delta
from cog_triton.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# How long after the model is ready the tokenizer is loaded, if no request needs it before.
LATE_SECONDS = 15.0


def decoded(tokenizer: Tokenizer, inputs: Inputs, *, skip_special_tokens: bool = True) -> Array:
    """Return the texts, UTF-8, shape [batch * beams], as NVIDIA's postprocessing does.

    Nothing is kept between responses. One that comes without the ids before it is decoded alone, which is
    exact if it holds a whole text, and may lose a space or split a character if it is streamed.

    Args:
        inputs: TOKENS_BATCH [batch, beams, n], SEQUENCE_LENGTH [batch, beams], and optionally
            CONTEXT_IDS [batch, n], IS_FINAL [batch, 1] and CUT_CHARACTERS [batch, 1].
    """
    ids = inputs["TOKENS_BATCH"]
    lengths = inputs["SEQUENCE_LENGTH"]
    if lengths.shape != ids.shape[:2]:
        raise InvalidParameter(
            f"SEQUENCE_LENGTH must be of shape {list(ids.shape[:2])}, not {list(lengths.shape)}"
        )
    if (lengths < 0).any():
        raise InvalidParameter(f"SEQUENCE_LENGTH must be at least 0, not {lengths.min()}")
    context = inputs.get("CONTEXT_IDS")
    final = inputs.get("IS_FINAL")
    cut = inputs.get("CUT_CHARACTERS")
    texts: list[bytes] = []
    try:
        for i, beams in enumerate(ids):
            for beam, length in zip(beams, lengths[i], strict=True):
                text = decode_delta(
                    tokenizer,
                    [] if context is None else context[i].tolist(),
                    beam[:length].tolist(),
                    final=True if final is None else bool(final[i].any()),
                    skip_special_tokens=skip_special_tokens,
                )
                if cut is not None:
                    text = text[: max(0, len(text) - max(0, int(cut[i].max())))]
                texts.append(text.encode())
    except OverflowError:
        # The tokenizer finds them; to look at each id would cost time.
        raise InvalidParameter("token ids must be at least 0") from None
    return np.array(texts, np.object_)


class LateTokenizer:
    """The tokenizer, loaded for the first response, or after a while.

    Its import takes two seconds of a processor. While a deployment starts, the engine's process needs them
    more: clients that decode by themselves, as this project's do, never ask for this model.
    """

    def __init__(self, load: Callable[[], Tokenizer], seconds: float = LATE_SECONDS) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._tokenizer: Tokenizer = None
        self._timer = threading.Timer(seconds, self._load_quietly)
        self._timer.daemon = True
        self._timer.start()

    def get(self) -> Tokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._load()
            return self._tokenizer

    def close(self) -> None:
        self._timer.cancel()

    def _load_quietly(self) -> None:
        try:
            self.get()
        except Exception:
            # The next request tries again, and gets the error.
            logger.exception("the tokenizer of postprocessing could not be loaded")


def is_checked_by_preprocessing(model_directory: Path, parameters: Mapping[str, str]) -> bool:
    """Return whether the model preprocessing, beside this one, fails to load if the tokenizer does."""
    try:
        text = (model_directory.parent / "preprocessing" / "config.pbtxt").read_text("utf-8")
    except OSError:
        return False
    found = {}
    for name in ("tokenizer_dir", "trust_remote_code"):
        value = re.search(rf'key: "{name}"\s+value:? {{\s*string_value: "([^"]*)"', text)
        found[name] = "" if value is None else value[1]
    return all(parameters.get(name, "") == value for name, value in found.items())


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        _, parameters = stub.begin(args)
        self._tokenizer = LateTokenizer(partial(stub.tokenizer, parameters))
        if not is_checked_by_preprocessing(Path(args["model_repository"]), parameters):
            self._tokenizer.get()
        self._skip = parameters.get("skip_special_tokens", "true") == "true"

    def execute(self, requests: list[Any]) -> list[Any]:
        # It may still be read from a disk. Its error is each request's.
        with contextlib.suppress(Exception):
            self._tokenizer.get()
        responses = []
        for request in requests:
            with stub.ends_after_standstill():
                responses.append(self._respond(request))
        return responses

    def finalize(self) -> None:
        self._tokenizer.close()

    def _respond(self, request: Any) -> Any:
        inputs = stub.arrays(request.inputs())
        try:
            tokenizer = self._tokenizer.get()
            text = decoded(tokenizer, inputs, skip_special_tokens=self._skip)
            unchanged = {f"OUT_{name}": value for name, value in inputs.items()}
            return stub.response({"OUTPUT": text, **unchanged}, request.requested_output_names())
        except Exception as error:
            return stub.failure("postprocessing", error)
