"""Every error a caller can meet, one code per error.

    CogTritonError
    ├── UserError                     the request is at fault, a retry unchanged will fail again
    │   ├── PromptRequired            E1001
    │   ├── PromptTooLong             E1002
    │   ├── BadPromptTemplate         E1003
    │   ├── PromptTemplateError       E1004
    │   ├── ChatTemplateError         E1005
    │   ├── ConflictingMinTokens      E1101
    │   ├── ConflictingMaxTokens      E1102
    │   └── InvalidParameter          E1103
    ├── ServerError                   the deployment is at fault, the request may be fine
    │   ├── TritonUnknownError        E2100
    │   ├── TritonTimeout             E2101
    │   ├── TritonTokenizerError      E2102
    │   ├── TritonMalformedJSON       E2103
    │   ├── TritonMalformedEvent      E2104
    │   ├── TritonUnavailable         E2105
    │   └── TritonOverloaded          E2106
    ├── ConfigurationError            E3001: found while setting up, before any request
    │   ├── TemplateError             E3002
    │   └── TritonStartError          E3003
    │       └── TritonPortTaken       E3004
    └── EngineBuildError              E3101

Codes E1001 to E1102 and E2100 to E2104 are those of cog-triton, which its users' clients match on;
the others are new. ``str(error)`` starts with the code, because Cog reports a failed prediction by
that text alone.
"""

from __future__ import annotations

import re
import shutil

SHOWN_CHARACTERS = 60
"""Of what a request brought, in the text of an error."""


def shortened(text: str, limit: int) -> str:
    """The text, cut to so many characters."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def is_unicode(text: str) -> bool:
    """Whether a text can be written as bytes: JSON can have halves of surrogate pairs, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: object) -> str:
    """A value of a request, as the text of an error shows it."""
    if isinstance(value, int) and value.bit_length() > 4 * SHOWN_CHARACTERS:
        return f"a number of {value.bit_length()} bits"  # Python refuses to write the longest
    return shortened(str(value), SHOWN_CHARACTERS)


class CogTritonError(Exception):
    """Base of all errors raised on purpose by this package.

    Attributes:
        code: "E" and four digits, stable across releases.
        message: what went wrong and what to do, in one or two sentences.
        retryable: whether the same request may succeed when it is sent again.
        longest: characters to which a message is cut, which may have some of the request in it.
    """

    code = "E0000"
    retryable = False
    longest = 2_000

    def __init__(self, message: str) -> None:
        self.message = shortened(message, self.longest)
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.code} {type(self).__name__}: {self.message}"


class UserError(CogTritonError):
    """The request is at fault."""

    code = "E1000"


class PromptRequired(UserError):
    """No prompt, or an empty one."""

    code = "E1001"


class PromptTooLong(UserError):
    """The prompt has more tokens than the engine accepts."""

    code = "E1002"


class BadPromptTemplate(UserError):
    """The prompt template has no place for the prompt."""

    code = "E1003"


class PromptTemplateError(UserError):
    """The prompt template cannot be filled."""

    code = "E1004"


class ChatTemplateError(UserError):
    """The model has no chat template, or it refuses the messages."""

    code = "E1005"


class ConflictingMinTokens(UserError):
    """min_tokens and min_new_tokens were both given."""

    code = "E1101"


class ConflictingMaxTokens(UserError):
    """max_tokens and max_new_tokens were both given."""

    code = "E1102"


class InvalidParameter(UserError):
    """A sampling parameter is outside its range, or two of them contradict."""

    code = "E1103"


class ServerError(CogTritonError):
    """The deployment is at fault."""

    code = "E2000"


class TritonUnknownError(ServerError):
    """Triton answered with an error that is none of the known ones."""

    code = "E2100"


class TritonTimeout(ServerError):
    """Triton sent nothing for longer than the time limit."""

    code = "E2101"


class TritonTokenizerError(ServerError):
    """Preprocessing or postprocessing failed on valid input."""

    code = "E2102"


class TritonMalformedJSON(ServerError):
    """Triton's HTTP endpoint sent a body or an event that is not JSON."""

    code = "E2103"


class TritonMalformedEvent(ServerError):
    """A response lacks an output or has one of the wrong type or shape, or responses were lost."""

    code = "E2104"


class TritonUnavailable(ServerError):
    """Triton cannot be reached: it died, or it is not ready."""

    code = "E2105"
    retryable = True


class TritonOverloaded(ServerError):
    """The queue in front of the engine is full, or the engine's own.

    Attributes:
        retry_after: seconds after which there may be a place.
    """

    code = "E2106"
    retryable = True

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ConfigurationError(CogTritonError):
    """The settings, the configuration file or the model is at fault."""

    code = "E3001"
    longest = 20_000  # with the last lines of a log


class TemplateError(ConfigurationError):
    """A config template cannot be filled."""

    code = "E3002"


class TritonStartError(ConfigurationError):
    """tritonserver died, or was not ready in time."""

    code = "E3003"


class TritonPortTaken(TritonStartError):
    """A port was free when it was chosen, and taken before tritonserver listened on it."""

    code = "E3004"


class EngineBuildError(CogTritonError):
    """A step of an engine's build failed."""

    code = "E3101"


class EngineError(Exception):
    """A request that an embedded engine refuses, or that failed in it; the text is for the client."""


class EngineUnavailable(EngineError):
    """The engine has stopped, or takes no more now: the request may be fine."""


def file_problem(error: OSError) -> str:
    """The file that could not be read or written, and why, in a line."""
    if isinstance(
        error, shutil.Error
    ):  # of a directory's copy: source, destination and reason of each
        _, file, reason = error.args[0][0]
        return f"{file}: {reason}"
    name = error.filename2 or error.filename
    return f"{name}: {error.strerror}" if name else str(error)


# What Triton's texts of errors say, without what it and its Python stubs put around that.
#
#     Internal: ValueError: no such model\n\nAt:\n  model.py(36): initialize    →  no such model
#     in ensemble 'ensemble', Failed to process the request(s) for model instance 'preprocessing_0_0',
#     message: no prompt                                                         →  no prompt
#
# A traceback is one of the stub's, or of TensorRT-LLM's C++ with an address a line.

LONGEST = 500
LISTENS = "Started Metrics Service at"
"""What tritonserver says when it listens on all of its ports, of which that one is the last."""
IN_USE = "already in use"
"""What tritonserver says of a port, before it ends."""
ANSWERED = "Found 0 model versions that have in-flight inferences"
"""What tritonserver says when it was told to stop and has answered every request."""
NOT_CACHED = r"LoRA task \d+ not found in cache"
"""What TensorRT-LLM says of an adapter that it has not been given, or has evicted."""
READ = 20_000
"""Characters that are read of a text, which may have a whole request in it."""

_TRACEBACK = re.compile(r"\n+At:\n|\n+Traceback \(most recent call last\):|\n+\d+ +0x[0-9a-f]+ ")
_AROUND = re.compile(
    r"in ensemble '[^']*', *"
    r"|Failed to process the request\(s\) for model (?:instance )?'[^']*', message: *"
    r"|(?:Internal|Invalid argument|Not found|Unavailable|Unsupported|Unknown)(?:: | - )"
    # What Python is told to raise with a text of its own, and this package's errors, which have one.
    r"|(?:EngineError|EngineUnavailable|OSError|RuntimeError|TritonModelException|ValueError): "
    r"|(?:\w+: )?E\d{4} \w+: "
)


_GONE = re.compile(r"Stub process '[^']*' is not healthy")
ENDED = "its process ended without a word, as one does that the kernel kills for want of memory"


def cause(text: str) -> str:
    """What went wrong, in one line of at most ``LONGEST`` characters."""
    text = text[:READ]
    if _GONE.search(text):
        return ENDED
    text = _TRACEBACK.split(text.replace("\\n", "\n").strip('" \n'))[0]
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    while around := _AROUND.match(paragraph):
        paragraph = paragraph[around.end() :]
    return paragraph if len(paragraph) <= LONGEST else f"{paragraph[: LONGEST - 1]}…"
