#!/usr/bin/env python3
"""Write what pip needs to add the packages of image.in to an image that has TensorRT-LLM or vLLM.

``image_requirements.py DIRECTORY`` reads image.in and its lock image.txt there and writes

constraints.txt: what the engine and PyTorch need, and what that needs in turn, at the version there, with
which the engine was built and tested. protobuf and grpcio may move within what those packages ask for:
tritonclient's generated code ties it to a range of each, and an image may have a newer one.

additions.txt: the packages that the image lacks, as they are locked, with their hashes. Of those that stay,
because they are held or fit, the range in image.in, so that pip refuses one that does not fit.
"""

import re
import sys
from collections import defaultdict
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

# Of pip, because nothing but pip is certain to be there.
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.specifiers import SpecifierSet
from pip._vendor.packaging.utils import canonicalize_name

ADJUSTABLE = ("grpcio", "protobuf")


def main(directory: str) -> str | None:
    place = Path(directory)
    engines = [name for name in ("tensorrt_llm", "vllm") if installed(name)]
    if not engines or not installed("torch"):
        return "neither TensorRT-LLM nor vLLM with PyTorch is installed in this image"
    held = constraints([*engines, "torch"])
    kept = held.keys() - ADJUSTABLE
    ranges = re.findall(r"^\w[^#\n]*", (place / "image.in").read_text(), re.MULTILINE)
    wanted = {canonicalize_name(r.name): r for r in map(Requirement, ranges)}
    for name, requirement in wanted.items():
        found = installed(name)
        if found and requirement.specifier.contains(found, prereleases=True):
            kept.add(name)
    additions = [str(requirement) for name, requirement in wanted.items() if name in kept]
    # A package of the lock is a requirement, then its hashes on continued lines.
    lock = re.findall(r"^([\w.-]+)((?:.*\\\n)*.*)", (place / "image.txt").read_text(), re.MULTILINE)
    additions += [name + rest for name, rest in lock if canonicalize_name(name) not in kept]
    (place / "constraints.txt").write_text("\n".join(held.values()))
    (place / "additions.txt").write_text("\n".join(additions))
    return None


def constraints(roots: list[str]) -> dict[str, str]:
    """Return the constraint of each installed package that the roots need, and of the roots, by name."""
    specifiers = defaultdict[str, SpecifierSet](SpecifierSet)
    followed: set[tuple[str, str]] = set()
    # It grows while it is read.
    queue = [Requirement(root) for root in roots]
    for requirement in queue:
        name = canonicalize_name(requirement.name)
        specifiers[name] &= requirement.specifier
        for extra in ("", *requirement.extras):
            if (name, extra) not in followed and installed(name):
                followed.add((name, extra))
                needs = map(Requirement, requires(name) or [])
                queue += [r for r in needs if not r.marker or r.marker.evaluate({"extra": extra})]
    return {
        name: f"{name}{specifiers[name]}" if name in ADJUSTABLE else f"{name}=={installed(name)}"
        for name in sorted(filter(installed, specifiers))
    }


def installed(name: str) -> str | None:
    """Return a package's version; None if it is not there, as some that others name are not."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
