"""What nobody may read in a log, an error or a tar: tokens, passwords, and such parts of URLs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

MASK = "***"
_SHORTEST = 6  # anything shorter would blank out ordinary text

_WORD = re.compile(r"[a-z0-9]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SECRET_WORD = re.compile(
    r".*(token|secret|password|passwd|passphrase|credential)s?"
    r"|(api|access|private|ssh)?keys?|auth|authorization|bearer"
)
# What an argument with "token" in its name is set to, such as max_num_tokens or per_token.
_HARMLESS = re.compile(r"\d+|auto|enable|disable|true|false|float16|bfloat16|float32|int32|fp8")
_HF_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_USER = re.compile(r"(?<![\w+.-])([A-Za-z][\w+.-]*://)[^/\s@'\"]*@")
_QUERY = re.compile(r"(?<![\w+.-])([A-Za-z][\w+.-]*://[^\s?#'\"<>]*)\?[^\s#'\"<>]*")


class Redactor:
    """Masks known secrets, and what looks like one, in text and in plain data."""

    def __init__(self, secrets: Iterable[str | None] = ()) -> None:
        known = {secret for secret in secrets if secret and len(secret) >= _SHORTEST}
        self._known = sorted(known, key=len, reverse=True)  # one may contain another

    def __call__(self, text: str) -> str:
        """The text without secrets."""
        for secret in self._known:
            text = text.replace(secret, MASK)
        text = _HF_TOKEN.sub(MASK, text)
        text = _USER.sub(rf"\1{MASK}@", text)
        return _QUERY.sub(rf"\1?{MASK}", text)

    def clean(self, value: Any, name: str = "") -> Any:
        """Plain data without secrets: the values of names like hf_token, and secrets in any text."""
        if isinstance(value, Mapping):
            if is_secret_name(name):
                return MASK
            return {key: self.clean(item, str(key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.clean(item, name) for item in value]
        if isinstance(value, str):
            return MASK if holds_secret(name, value) else self(value)
        return value


def is_secret_name(name: str) -> bool:
    """Whether what has this name may be a secret: hf_token and apiKey may, tokenizer may not."""
    words = _WORD.findall(_CAMEL.sub("_", name).lower())
    return any(_SECRET_WORD.fullmatch(word) for word in words)


def holds_secret(name: str, value: str) -> bool:
    """Whether a text of this name is a secret; max_num_tokens may be "8192"."""
    return is_secret_name(name) and not _HARMLESS.fullmatch(value.strip().lower()) and value != ""


def secrets_in(value: Any, name: str = "") -> list[str]:
    """Every secret in plain data: what ``clean`` masks because of its name or its place in a URL."""
    if isinstance(value, Mapping):
        return [s for key, item in value.items() for s in secrets_in(item, str(key))]
    if isinstance(value, list | tuple):
        return [s for item in value for s in secrets_in(item, name)]
    if not isinstance(value, str):
        return []
    return [value] if holds_secret(name, value) else _url_secrets(value)


def _url_secrets(text: str) -> list[str]:
    if "://" not in text:
        return []
    try:
        url = urlsplit(text)
    except ValueError:
        return []
    # A name alone is a token; one before a password is a name such as "oauth2".
    return [part for part in (url.password or url.username, url.query) if part]
