#!/usr/bin/env python3
"""Prints what an image lacks of a lock file, as requirements for `pip install --require-hashes`.

    python3 scripts/image_additions.py requirements/image.in requirements/image.txt constraints.txt

What the image has stays: the packages of constraints.txt (from scripts/image_constraints.py) that have one
version there, and those that fit image.in. They came with the image, and its digest vouches for them. Of
them the range in image.in is printed, so that pip refuses one that does not fit. All others are printed
as they are locked.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

# Of pip, because nothing but pip is certain to be there.
from image_constraints import canonical, installed
from pip._vendor.packaging.requirements import Requirement


def main(argv: list[str] | None = None) -> int:
    """Prints the requirements."""
    ranges, lock, constraints = (
        Path(name).read_text(encoding="utf-8") for name in argv or sys.argv[1:]
    )
    print("\n".join(additions(ranges, lock, constraints)))
    return 0


def additions(ranges: str, lock: str, constraints: str) -> list[str]:
    """The requirements, from the texts of image.in, image.txt and constraints.txt."""
    wanted = {canonical(r.name): r for r in parsed(ranges.splitlines())}
    kept = {canonical(r.name) for r in parsed(constraints.splitlines()) if "==" in str(r)}
    kept |= {name for name, requirement in wanted.items() if fits(requirement)}
    return [
        *(str(requirement) for name, requirement in wanted.items() if name in kept),
        *(block for name, block in blocks(lock) if name not in kept),
    ]


def parsed(lines: Iterable[str]) -> Iterator[Requirement]:
    """The requirements of a file that has no options."""
    texts = (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines)
    return map(Requirement, filter(None, texts))


def fits(requirement: Requirement) -> bool:
    """Return whether an installed package meets a requirement."""
    version = installed(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def blocks(lock: str) -> Iterator[tuple[str, str]]:
    """The name and the lines of each package of a lock file: a requirement, then its hashes."""
    for block in re.findall(r"^\w(?:.*\\\n)*.*", lock, re.MULTILINE):
        yield canonical(re.split(r"[^\w.-]", block, maxsplit=1)[0]), block


if __name__ == "__main__":
    sys.exit(main())
