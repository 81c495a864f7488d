"""Structured output: guides as llguidance's grammars, and the tokens that they allow next.

llguidance bounds what a guide may cost once it runs, but not its compiler: a schema of 59 patterns that
must all match kept it busy for more than three minutes, and nothing ends that but the end of its process.
So each guide is tried in a process of its own, which is this module's ``main``.
"""

import contextlib
import json
import math
import resource
import select
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

from cog_triton.engines.base import EngineError, GenerationRequest
from cog_triton.processes import end_with_parent, python
from cog_triton.request.guide import Guide, GuideKind, ascii_classes

Masks = npt.NDArray[np.bool_]  # [sequences, vocabulary]: the tokens that are allowed
COMPILED = 64  # guides that are kept; one of 64 KB takes about a megabyte
SECONDS = 2  # of a processor; the longest guides that are known to be used take a third of one
TRIALS = 8  # guides that are compiled at the same time; each may take MEMORY
PATIENCE = 60.0  # seconds, on a busy machine and while the process starts
MEMORY = 2 << 30

# Of one guide, so that it cannot hold up the others: fuel burns at 50,000 units a millisecond while a guide
# is compiled, and at 14,000 for a mask.
LIMITS = LLParserLimits(initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, verbose_errors=False)

# Between the parts of JSON. A model that may indent as well can spend all of max_tokens on that.
WHITESPACE = " ?"

# The schemas in a schema: as the values of an object, in a list, or one.
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONES = ("items", "additionalProperties")
# The formats of texts that llguidance holds a text to. JSON Schema has all others be annotations.
_FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
)
# With these a part of a schema describes a part of an object, or what it must not be: each stays open.
_PARTED = {"not", "if", "oneOf", "dependencies", "dependentSchemas", "dependentRequired"}
_PARTED |= {"unevaluatedProperties"}
_ELSEWHERE = {"$ref", "allOf", "anyOf"}
_OBJECT = {"properties", "patternProperties", "additionalProperties", "required", "minProperties"}


def grammar(guide: Guide) -> str:
    """Return a guide as llguidance's own grammar; a ValueError says why there is none."""
    kind, text = guide.kind, guide.text
    try:
        if kind in (GuideKind.JSON, GuideKind.JSON_SCHEMA):
            schema = '{"type": "object"}' if kind is GuideKind.JSON else without_others(text)
            overrides: Any = {"whitespace_pattern": WHITESPACE}
            return LLMatcher.grammar_from_json_schema(schema, overrides=overrides)
        if kind is GuideKind.REGEX:
            return LLMatcher.grammar_from_regex(text)
        if kind is GuideKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(gbnf_to_lark(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except Exception as error:  # its errors have no class of their own
        raise ValueError(str(error)) from None
    raise ValueError("the embedded engine does not support this type")


def without_others(text: str) -> str:
    """Return a JSON schema whose objects have only the properties that are listed.

    A schema that says nothing of other properties allows any, and some models never stop adding them.
    xgrammar, the default of vLLM and TensorRT-LLM, makes only those that are listed; llguidance makes any.
    An object put together from parts is left as it is, and so is what is not a schema.
    """
    try:
        schema = json.loads(text)
        nodes = list(_schemas(schema))
        for node in nodes:
            if isinstance(node.get("pattern"), str):
                node["pattern"] = ascii_classes(node["pattern"])
            if isinstance(node.get("format"), str) and node["format"] not in _FORMATS:
                del node["format"]
        if not any(map(_is_parted, nodes)):
            for node in filter(_may_be_closed, nodes):
                node["additionalProperties"] = False
        return json.dumps(schema, allow_nan=False)
    except (ValueError, TypeError, AttributeError):
        return text


def _schemas(root: Any) -> Iterator[dict[str, Any]]:
    found = [root]
    for node in found:  # which grows
        for key, value in node.items() if isinstance(node, dict) else ():
            if key in _MAPS and isinstance(value, dict):
                found += value.values()
            elif key in _LISTS and isinstance(value, list):
                found += value
            elif key in _ONES:
                found.append(value)
    return filter(lambda node: isinstance(node, dict), found)


def _is_parted(node: dict[str, Any]) -> bool:
    both = not _ELSEWHERE.isdisjoint(node) and not _OBJECT.isdisjoint(node)
    return both or not _PARTED.isdisjoint(node) or len(node.get("allOf", ())) > 1


def _may_be_closed(node: dict[str, Any]) -> bool:
    listed = node.get("properties", {})
    required, least = set(node.get("required", ())), node.get("minProperties", 0)
    enough = required <= listed.keys() and least <= len(listed)
    return bool(listed) and enough and "additionalProperties" not in node


@dataclass(eq=False)
class Guided:
    """The state of one sequence in its guide."""

    matcher: Any
    end_ids: list[int]  # are allowed where the guide may end, and only there
    tokens: list[int]  # of the sequence, and the number of them that the matcher has had
    consumed: int
    error: EngineError | None = None  # why it cannot go on


class _UnreadableTokenizer(Exception):
    """Its text says why guides cannot be had."""


def _read_tokenizer(load_tokenizer: Callable[[], Any], vocabulary: int) -> Any:
    """Return llguidance's form of a tokenizer, or raise _UnreadableTokenizer."""
    from llguidance.hf import from_tokenizer  # imports transformers

    try:
        tokenizer = load_tokenizer()
    except Exception as error:  # whatever a tokenizer's files may cause
        raise _UnreadableTokenizer(f"the model's tokenizer cannot be loaded: {error}") from None
    kind = type(tokenizer).__name__
    if not getattr(tokenizer, "is_fast", False):
        raise _UnreadableTokenizer(
            f"guides need a fast tokenizer, one with a tokenizer.json; the model's is a {kind}"
        )
    try:
        return from_tokenizer(tokenizer, vocabulary)
    except Exception as error:  # whatever llguidance does with what it does not know
        reason = _one_line(str(error)) or type(error).__name__
        raise _UnreadableTokenizer(
            f"llguidance cannot read the model's tokenizer ({kind}): {reason}"
        ) from None


class Guides:
    """The guides of one engine. Methods may be called from any thread."""

    def __init__(self, load_tokenizer: Callable[[], Any], vocabulary: int) -> None:
        """Start to read the vocabulary, of so many ids, of a fast tokenizer of transformers."""
        self._vocabulary = vocabulary
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="guides")  # then for the masks
        self._tokenizer = self.thread.submit(_read_tokenizer, load_tokenizer, vocabulary)
        self._executor = LLExecutor()
        self._lock = threading.Lock()  # guards the next; nothing is compiled while it is held
        self._compiled: OrderedDict[Guide, Future[Any]] = OrderedDict()  # the last used at the end
        self._trials = _Trials()

    def begin(self, request: GenerationRequest, tokens: list[int]) -> Guided:
        """Compile a request's guide, unless it has been before; an EngineError says why not."""
        if not request.end_ids:
            text = "needs an end token: it cannot be combined with ignore_eos or end_id -1"
            raise EngineError(f"guided_decoding_guide {text}")
        compiled = self._compiled_once(request.guide)
        if isinstance(compiled, str):
            raise EngineError(compiled)
        matcher = compiled.deep_copy()
        if not matcher.consume_tokens(tokens[len(tokens) - request.continued :]):
            raise EngineError("guided_decoding_guide does not allow the output that is continued")
        return Guided(matcher, list(request.end_ids), tokens, len(tokens))

    def masks(self, sequences: list[Guided]) -> Masks:
        """Consume the new tokens of each sequence, then compute those that may follow."""
        for each in sequences:
            each.matcher.consume_tokens(each.tokens[each.consumed :])
            each.consumed = len(each.tokens)
        tokenizer = self._tokenizer.result()
        bits = allocate_token_bitmask(len(sequences), tokenizer.vocab_size)
        places = [(each.matcher, i) for i, each in enumerate(sequences)]
        fill_next_token_bitmask_par(self._executor, places, bits)
        masks = np.unpackbits(bits.view("u1"), axis=1, bitorder="little", count=self._vocabulary)
        # The model may have more ids than the tokenizer; those are not allowed.
        masks[:, tokenizer.vocab_size :] = 0
        masks[:, [i for i in tokenizer.eos_tokens if i < self._vocabulary]] = 0
        for each, allowed in zip(sequences, masks, strict=True):
            allowed[each.end_ids] = each.matcher.is_accepting()
            if each.matcher.is_error() or not allowed.any():
                reason = _one_line(each.matcher.get_error()) or "no token can follow"
                each.error = EngineError(f"guided_decoding_guide: {reason}")
                allowed[:] = 1
        return masks.view(np.bool_)

    def close(self) -> None:
        self.thread.shutdown(cancel_futures=True)
        self._trials.close()

    def _compiled_once(self, guide: Guide | None) -> Any:
        """Return what ``_compile`` does, from the cache if possible; requests of one guide compile it once.

        Requests of other guides do not wait.
        """
        assert guide is not None
        with self._lock:
            future = self._compiled.get(guide)
            is_first = future is None
            if future is None:
                future = self._compiled[guide] = Future()
            self._compiled.move_to_end(guide)
            while len(self._compiled) > COMPILED:
                self._compiled.popitem(last=False)
        if is_first:
            try:
                future.set_result(self._compile(guide))
            except BaseException as error:
                with self._lock:  # the next request tries again
                    self._compiled.pop(guide, None)
                future.set_exception(error)
        return future.result()

    def _compile(self, guide: Guide) -> Any:
        """Return a matcher at the guide's beginning, or as text why there is none; both are kept."""
        try:
            tokenizer = self._tokenizer.result()
        except _UnreadableTokenizer as error:
            return f"guided_decoding_guide: {error}"
        try:
            compiled = grammar(guide)
            problem = self._trials.problem(compiled)
        except ValueError as error:
            problem = str(error)
        if not problem:
            matcher = LLMatcher(tokenizer, compiled, limits=LIMITS, log_level=0)
            if not matcher.is_error():
                return matcher
            problem = matcher.get_error()
        kind = guide.kind.value
        return f"guided_decoding_guide of type {kind} cannot be used: {_one_line(problem)}"


class _Trials:
    """Processes that try grammars, one grammar at a time each; one that is idle is used again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the next two
        self._idle: list[Popen[str]] = []
        self._closed = False
        self._running = threading.BoundedSemaphore(TRIALS)

    def problem(self, grammar: str) -> str:
        """Return the reason why a process cannot compile a grammar; empty if it can."""
        with self._running:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            if process is None:
                command = [python(), "-m", __name__]  # ends with this process, or with its input
                process = Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, encoding="ascii")
            try:
                answer = _answer(process, grammar)
            except BaseException:
                _end(process)
                raise
            if answer is None:
                _end(process)
                return f"it takes more than {SECONDS} s to compile, or too much memory"
            with self._lock:
                is_kept = not self._closed and not self._idle
                if is_kept:
                    self._idle.append(process)
            if not is_kept:
                _end(process)
            return answer

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            _end(process)


def _answer(process: "Popen[str]", grammar: str) -> str | None:
    """Return what a process says of a grammar; None if it has ended, or says nothing in time."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError, ValueError):  # it has ended
        process.stdin.write(json.dumps(grammar) + "\n")
        process.stdin.flush()
        if select.select([process.stdout], [], [], PATIENCE)[0]:
            return str(json.loads(process.stdout.readline()))
    return None


def _end(process: "Popen[str]") -> None:
    process.kill()
    process.communicate()


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]


def main() -> None:
    """Answer each line, a grammar as JSON, with the problem of that grammar."""
    end_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    # Whether a guide compiles does not depend on the tokenizer: the tokens of this one are the bytes.
    tokenizer = LLTokenizer("byte")
    for line in sys.stdin:
        spent = math.ceil(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (spent + SECONDS, resource.RLIM_INFINITY))
        matcher = LLMatcher(tokenizer, json.loads(line), limits=LIMITS, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        print(json.dumps(matcher.get_error()), flush=True)


if __name__ == "__main__":
    main()
