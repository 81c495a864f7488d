"""Every error a caller can meet, one code per error.

Codes E1001 to E1102 and E2100 to E2104 are those of cog-triton, which its users' clients match on;
the others are new. ``str(error)`` starts with the code, because Cog reports a failed prediction by
that text only.
"""

import re
import shutil
from typing import TypeVar

SHOWN_CHARACTERS = 60  # of a request's value, in the text of an error


def shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def is_unicode(text: str) -> bool:
    """Return False for a text with half of a surrogate pair, which JSON can have and bytes cannot."""
    return re.search("[\ud800-\udfff]", text) is None


def shown(value: object) -> str:
    """Return a value of a request as the text of an error has it."""
    if isinstance(value, int) and value.bit_length() > 4 * SHOWN_CHARACTERS:
        return f"a number of {value.bit_length()} bits"  # Python refuses to write the longest
    return shortened(str(value), SHOWN_CHARACTERS)


class CogTritonError(Exception):
    """Base of all errors raised on purpose here. A message says what went wrong and what to do."""

    code = "E0000"  # stable across releases; given with each class
    retryable = False  # whether the same request may succeed when it is sent again
    longest = 2_000  # characters of a message, which may have some of the request in it
    # Whether the connection or another request caused it. The request is then tried again without limit
    # of number; see ``cog_triton.client.resume``.
    blameless = False

    def __init_subclass__(cls, code: str, retryable: bool | None = None) -> None:
        cls.code = code
        if retryable is not None:
            cls.retryable = retryable

    def __init__(self, message: str) -> None:
        self.message = shortened(message, self.longest)
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.code} {type(self).__name__}: {self.message}"


Error = TypeVar("Error", bound=CogTritonError)


def blameless(error: Error) -> Error:
    """Mark an error that the connection or another request caused, and return it."""
    error.blameless = True
    return error


# fmt: off
# The request is at fault, and a retry unchanged will fail again.
class UserError(CogTritonError, code="E1000"): ...
class PromptRequired(UserError, code="E1001"): ...  # no prompt, or an empty one
class PromptTooLong(UserError, code="E1002"): ...  # more tokens than the engine accepts
class BadPromptTemplate(UserError, code="E1003"): ...  # no place for the prompt in it
class PromptTemplateError(UserError, code="E1004"): ...  # it cannot be filled
class ChatTemplateError(UserError, code="E1005"): ...  # there is none, or it refuses the messages
class ConflictingMinTokens(UserError, code="E1101"): ...  # min_tokens and min_new_tokens differ
class ConflictingMaxTokens(UserError, code="E1102"): ...  # max_tokens and max_new_tokens differ
class InvalidParameter(UserError, code="E1103"): ...  # out of its range, or two contradict

# The deployment is at fault, and the request may be fine.
class ServerError(CogTritonError, code="E2000"): ...
class TritonUnknownError(ServerError, code="E2100"): ...  # an error of Triton's not listed here
class TritonTimeout(ServerError, code="E2101"): ...  # nothing came for longer than the time limit
class TritonTokenizerError(ServerError, code="E2102"): ...  # pre- or postprocessing failed
class TritonMalformedJSON(ServerError, code="E2103"): ...  # a body or event over HTTP
class TritonMalformedEvent(ServerError, code="E2104"): ...  # lacks an output, or was lost
class TritonUnavailable(ServerError, code="E2105", retryable=True):  # it died, or is not ready
    given_up_model = ""  # the model whose process Triton no longer waits for
class TritonOverloaded(ServerError, code="E2106", retryable=True):  # a queue is full
    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds after which there may be room
class JournalUnavailable(ServerError, code="E2107", retryable=True): ...  # full, damaged or locked
class LogitsNotFinite(ServerError, code="E2108"): ...  # NaN or infinite: damaged weights, an overflow

# Settings, configuration file or model, before any request.
class ConfigurationError(CogTritonError, code="E3001"):
    longest = 20_000  # with the last lines of a log
class TemplateError(ConfigurationError, code="E3002"): ...  # a template cannot be filled
class TritonStartError(ConfigurationError, code="E3003"): ...  # it died, or was not ready in time
class TritonPortTaken(TritonStartError, code="E3004"): ...  # by another process, once chosen
class EngineBuildError(CogTritonError, code="E3101"): ...  # a step of an engine's build failed
# fmt: on


def prompt_too_long(tokens: int, limit: int) -> PromptTooLong:
    """Return the error in the wording that makes OpenAI's clients shorten a chat."""
    return PromptTooLong(
        f"the prompt has {tokens} tokens, but this model's maximum context length is {limit} tokens, "
        "excluding output"
    )


class EngineError(Exception):
    """A request that an embedded engine refuses, or that failed in it; the text is for the client."""


class EngineFailure(EngineError):
    """The model's fault, not the request's: another attempt fails in the same way."""


class EngineUnavailable(EngineError):
    """The engine has stopped, or takes no more now: the request may be fine."""


def file_problem(error: OSError) -> str:
    """Name the file that could not be read or written, and why."""
    if isinstance(error, shutil.Error):  # source, destination and reason of each file
        _, file, reason = error.args[0][0]
        return f"{file}: {reason}"
    name = error.filename2 or error.filename
    return f"{name}: {error.strerror}" if name else str(error)


# Triton's texts

LISTENS = "Started Metrics Service at"  # all ports, of which this is the last
IN_USE = "already in use"  # of a port, before tritonserver ends
ANSWERED = "Found 0 model versions that have in-flight inferences"  # while it stops
DRAINS = '"Timeout '  # a count of what it waits for while it stops: connections, then requests
NOT_CACHED = r"LoRA task \d+ not found in cache"  # an adapter that TensorRT-LLM lacks, or evicted
READ = 20_000  # characters of a text, which may have a whole request in it
LONGEST = 500  # characters of a cause, which may have some of the request in it
ENDED = (
    "its process ended without an error message; the kernel may have killed it for lack of memory"
)
# It names an instance: the model, and two numbers.
_GONE = re.compile(r"Stub process '([^']*?)(?:_\d+_\d+)?' is not healthy")
_TRACEBACK = re.compile(r"\n+At:\n|\n+Traceback \(most recent call last\):|\n+\d+ +0x[0-9a-f]+ ")
_AROUND = re.compile(
    r"in ensemble '[^']*', *"
    r"|Failed to process the request\(s\) for model (?:instance )?'[^']*', message: *"
    r"|(?:Internal|Invalid argument|Not found|Unavailable|Unsupported|Unknown)(?:: | - )"
    # Python's, raised with a text, and this package's.
    r"|(?:EngineError|EngineFailure|EngineUnavailable|OSError|RuntimeError): "
    r"|(?:TritonModelException|ValueError): "
    r"|(?:\w+: )?E\d{4} \w+: "
)


def cause(text: str) -> str:
    """Return what went wrong in one line, without what Triton, its stubs and TensorRT-LLM put around it.

    Internal: ValueError: no such model\\n\\nAt:\\n  model.py(36): initialize    →  no such model
    """
    text = text[:READ]
    if _GONE.search(text):
        return ENDED
    text = _TRACEBACK.split(text.replace("\\n", "\n").strip('" \n'))[0]
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    while True:
        around = _AROUND.match(paragraph)
        if around is None:
            return shortened(paragraph, LONGEST)
        paragraph = paragraph[around.end() :]


# First match wins. The texts are those of TensorRT-LLM, vLLM, Triton 2.51 and this package's engines.
_ERRORS: tuple[tuple[str, type[CogTritonError]], ...] = (
    (r"logits are not finite numbers", LogitsNotFinite),
    (r"exceeds maximum input length|sequence length is potentially greater", PromptTooLong),
    (r"prompt has no tokens", PromptRequired),
    (r"[Mm]aximum queue size|(PEFT C|LoRA c)ache is full", TritonOverloaded),
    (
        r"is not within acceptable range"
        r"|must be (at least|at most|greater|between|as many|the same|among|one of|true or false|in [\[(])"
        r"|does not support"
        r"|needs decoupled_mode|lora_task_id|guided_decoding_guide"
        rf"|{NOT_CACHED}|lora module \S+ not enabled|low_rank must be|Expected layerId|few values for",
        InvalidParameter,
    ),
    (
        r"the engine has stopped|not ready|has no available versions|Stub process .* is not healthy",
        TritonUnavailable,
    ),
    (r"model (instance )?'(pre|post)processing", TritonTokenizerError),
)


def error_from_text(text: str) -> CogTritonError:
    """Return the error that a text from Triton stands for, with the cause that the text gives."""
    text = text[:READ]
    kind = next((kind for known, kind in _ERRORS if re.search(known, text)), TritonUnknownError)
    error = kind(cause(text) or "Triton gave no reason")
    gone = _GONE.search(text)
    if gone is not None and isinstance(error, TritonUnavailable):
        error.given_up_model = gone[1]
    return error
