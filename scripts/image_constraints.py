#!/usr/bin/env python3
"""Prints pip's constraints for adding packages to an image that has TensorRT-LLM or vLLM.

    python3 scripts/image_constraints.py > constraints.txt
    python3 scripts/image_constraints.py tensorrt_llm torch

What the named packages (default: torch, and tensorrt_llm or vllm) need, and what that needs in turn, keeps
the version that is installed: the engine was built and tested with it. Of the rest, pip may choose.

protobuf and grpcio are the exceptions: they may move within what these packages ask for. tritonclient's
generated code ties it to a range of each, and an image may have a newer one than that.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterable, Mapping

# Of pip, because nothing but pip is certain to be there.
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.specifiers import SpecifierSet

ENGINES = ("tensorrt_llm", "vllm")
ADJUSTABLE = ("grpcio", "protobuf")


def main(argv: list[str] | None = None) -> int:
    """Prints the constraints; returns 1, with the reason, if a package is not installed."""
    roots = (sys.argv[1:] if argv is None else argv) or default_roots()
    try:
        lines = constraints(roots)
    except importlib.metadata.PackageNotFoundError as error:
        print(
            f"{error.name} is not installed: is this an image with TensorRT-LLM or vLLM?",
            file=sys.stderr,
        )
        return 1
    print("\n".join(lines))
    return 0


def default_roots() -> list[str]:
    """The engine that is installed, or the first if none is, and PyTorch."""
    engines = [name for name in ENGINES if installed(name)]
    return [*(engines or ENGINES[:1]), "torch"]


def constraints(roots: Iterable[str]) -> list[str]:
    """A line for each package that the roots need, directly or not, and for the roots.

    Raises:
        importlib.metadata.PackageNotFoundError: a root is not installed.
    """
    asked: dict[str, SpecifierSet] = {}
    extras: dict[str, set[str]] = {}
    for root in roots:
        importlib.metadata.version(root)
        extras[canonical(root)] = {""}
        asked[canonical(root)] = SpecifierSet()
    queue = [(name, "") for name in asked]
    for name, extra in queue:  # it grows while it is read
        for requirement in requirements(name, extra):
            needed = canonical(requirement.name)
            asked[needed] = asked.get(needed, SpecifierSet()) & requirement.specifier
            for wanted in ["", *requirement.extras]:
                if wanted not in extras.setdefault(needed, set()):
                    extras[needed].add(wanted)
                    queue.append((needed, wanted))
    versions = {name: version for name in asked if (version := installed(name))}
    return [line(name, versions[name], asked) for name in sorted(versions)]


def line(name: str, version: str, asked: Mapping[str, SpecifierSet]) -> str:
    """The constraint of a package."""
    return f"{name}{asked[name]}" if name in ADJUSTABLE else f"{name}=={version}"


def requirements(name: str, extra: str) -> list[Requirement]:
    """Return an installed package's requirements here; its extra's, if one is named."""
    try:
        texts = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    parsed = map(Requirement, texts)
    return [r for r in parsed if r.marker is None or r.marker.evaluate({"extra": extra})]


def installed(name: str) -> str | None:
    """The version of a package; None if it is not there, as some that others name are not."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def canonical(name: str) -> str:
    """A package's name as pip compares it."""
    return re.sub("[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
