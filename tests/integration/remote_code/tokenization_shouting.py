from typing import Any

from transformers import PreTrainedTokenizerFast


class ShoutingTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc, unused-ignore]
    """Decodes what nobody else would, so that it can be told apart. 🚀"""

    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return str(super()._decode(*args, **kwargs)).upper()
