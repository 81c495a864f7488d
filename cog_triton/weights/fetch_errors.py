"""Errors between these modules; who calls ``fetch`` gets a ConfigurationError in their place."""

from __future__ import annotations


class Unreachable(Exception):
    """The server did not answer; the text is a message for the user."""


class Interrupted(Exception):
    """A request came to nothing, and another may not."""


class NoSpace(Exception):
    """The disk is full.

    Attributes:
        needed: bytes that it takes; None if nobody knows.
    """

    def __init__(self, needed: int | None) -> None:
        super().__init__(needed)
        self.needed = needed
