"""Guides as llguidance's grammars, tried out in a process of its own before an engine compiles them.

llguidance bounds what a guide may cost once it runs, but not its compiler: a schema of 59 patterns that
must all match kept it busy for more than three minutes, and nothing ends that but the end of its process.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from cog_triton.engines.interpreter import python
from cog_triton.processes import end_with_parent
from cog_triton.request.request import Guide, GuideKind, ascii_classes

SECONDS = 2  # of a processor; the longest guides that are known to be used take a third of one
PATIENCE = 20.0  # seconds, on a busy machine
MEMORY = 2 << 30

# Of one guide, so that it cannot hold up the others: fuel burns at 50,000 units a millisecond while a guide
# is compiled, and at 14,000 for a mask.
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, verbose_errors=False
)

# Between the parts of JSON. A model that may indent as well can spend all of max_tokens on that.
WHITESPACE = " ?"

# The schemas in a schema: as the values of an object, in a list, or one.
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONES = ("items", "additionalProperties")
# With these a part of a schema describes a part of an object, or what it must not be: each part has to stay
# open for the others.
_PARTED = {
    *("not", "if", "oneOf", "dependentSchemas", "dependentRequired", "dependencies"),
    "unevaluatedProperties",
}
_ELSEWHERE = {"$ref", "allOf", "anyOf"}
_OBJECT = {"properties", "patternProperties", "additionalProperties", "required", "minProperties"}


def grammar(guide: Guide) -> str:
    """Return a guide as llguidance's own grammar.

    Raises:
        ValueError: it is not even JSON, or not a grammar.
    """
    matcher = llguidance.LLMatcher
    try:
        if guide.kind in (GuideKind.JSON, GuideKind.JSON_SCHEMA):
            is_schema = guide.kind is GuideKind.JSON_SCHEMA
            schema = without_others(guide.text) if is_schema else '{"type": "object"}'
            overrides: Any = {"whitespace_pattern": WHITESPACE}
            return matcher.grammar_from_json_schema(schema, overrides=overrides)
        if guide.kind is GuideKind.REGEX:
            return matcher.grammar_from_regex(guide.text)
        if guide.kind is GuideKind.GRAMMAR:
            return matcher.grammar_from_lark(gbnf_to_lark(guide.text))
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
        if not any(map(_is_parted, nodes)):
            for node in filter(_may_be_closed, nodes):
                node["additionalProperties"] = False
        return json.dumps(schema, allow_nan=False)
    except (ValueError, TypeError):
        return text


def _schemas(root: Any) -> Iterator[dict[str, Any]]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for key, value in node.items():
            if key in _MAPS and isinstance(value, dict):
                waiting += value.values()
            elif key in _LISTS and isinstance(value, list):
                waiting += value
            elif key in _ONES:
                waiting.append(value)


def _is_parted(node: dict[str, Any]) -> bool:
    both = not _ELSEWHERE.isdisjoint(node) and not _OBJECT.isdisjoint(node)
    return both or not _PARTED.isdisjoint(node) or len(node.get("allOf", ())) > 1


def _may_be_closed(node: dict[str, Any]) -> bool:
    listed = node.get("properties")
    if not listed or not isinstance(listed, dict) or "additionalProperties" in node:
        return False
    return set(node.get("required", ())) <= listed.keys() and (
        node.get("minProperties", 0) <= len(listed)
    )


class GuideCheck:
    """Compiles grammars in another process. For one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def problem(self, grammar: str) -> str:
        """Return the reason why llguidance cannot compile a grammar; empty if it can."""
        if self._process is None:
            command, pipe = [python(), "-m", __name__], subprocess.PIPE
            # Ends with this process, and when its input is closed.
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, encoding="ascii"
            )
            self._ask(self._process, "", seconds=60)  # while it starts
        problem = self._ask(self._process, grammar, PATIENCE)
        if problem is None:
            self.close()
            return f"it takes more than {SECONDS} s to compile, or too much memory"
        return problem

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _ask(self, process: Any, grammar: str, seconds: float) -> str | None:
        with contextlib.suppress(OSError, ValueError):  # it has ended
            process.stdin.write(json.dumps(grammar) + "\n")
            process.stdin.flush()
            if select.select([process.stdout], [], [], seconds)[0]:
                return str(json.loads(process.stdout.readline()))
        return None


def main() -> None:
    """Answer each line, a grammar as JSON, with the problem of that grammar."""
    end_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    # Whether a guide compiles does not depend on the tokenizer: the tokens of this one are the bytes.
    tokenizer = llguidance.LLTokenizer("byte")
    for line in sys.stdin:
        grammar, problem = json.loads(line), ""
        if grammar:
            spent = math.ceil(time.process_time())
            resource.setrlimit(resource.RLIMIT_CPU, (spent + SECONDS, resource.RLIM_INFINITY))
            matcher = llguidance.LLMatcher(tokenizer, grammar, limits=LIMITS, log_level=0)
            if not matcher.is_error():
                matcher.compute_bitmask()
            problem = matcher.get_error()
        print(json.dumps(problem), flush=True)


if __name__ == "__main__":
    main()
