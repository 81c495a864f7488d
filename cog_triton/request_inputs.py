"""Fields of a Request from inputs that are texts, as Cog has them."""

from __future__ import annotations

from cog_triton.errors import InvalidParameter
from cog_triton.guide import Guide, GuideKind
from cog_triton.protocol import parse_biases


def parse_logit_bias(text: str | None) -> tuple[tuple[int, float], ...]:
    """The input logit_bias: a JSON object of token ids and what is added to their logits.

    Raises:
        InvalidParameter: it is something else.
    """
    try:
        return tuple(parse_biases(text or "{}").items())
    except ValueError as error:
        raise InvalidParameter(str(error)) from None


def choose_guide(
    *,
    json_schema: str | None = None,
    regex: str | None = None,
    grammar: str | None = None,
    choice: str | None = None,
) -> Guide | None:
    """What the output has to be, of inputs that exclude each other; None if none is given.

    Raises:
        InvalidParameter: more than one is given.
    """
    given = {
        GuideKind.JSON_SCHEMA: json_schema,
        GuideKind.REGEX: regex,
        GuideKind.GRAMMAR: grammar,
        GuideKind.CHOICE: choice,
    }
    guides = [Guide(kind, text) for kind, text in given.items() if text is not None]
    if len(guides) > 1:
        kinds = " and ".join(guide.kind.value for guide in guides)
        raise InvalidParameter(f"{kinds} exclude each other: give one of them")
    return guides[0] if guides else None
