"""What Cog calls a prediction's error, and nothing else.

Measured with Cog 0.23: it writes the exception's qualified class name and a colon before its text. A text
that begins with that name would have it twice. To be deleted when Cog writes the text alone.
"""

from __future__ import annotations


def name_once(error: BaseException) -> BaseException:
    """The same error; one whose text begins with its class's name (``E1001 PromptRequired: …``) has the
    beginning as the class's name from now on, and the rest as its text."""
    head, _, text = str(error).partition(": ")
    if type(error).__name__ in head.split():
        error.__class__ = type(head, (type(error),), {"__str__": lambda _: text})
    return error
