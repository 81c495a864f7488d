"""API keys: who may ask, and how much of the server is theirs. In memory there are only their hashes.

A list of keys has one a line: a name, the key or the hash of it, and what may be said of it:

    NAME KEY [weight=2] [max_running=8] [requests_per_minute=60] [tokens_per_minute=20000]

The hash is ``sha256:`` and 64 hexadecimal digits. Names are in the log and in the metrics; keys never are.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cog_triton.errors import ConfigurationError, shown

logger = logging.getLogger(__name__)
RELOAD_SECONDS = 1.0
"""Between two looks at the file."""
_HASH = re.compile(r"sha256:([0-9a-fA-F]{64})")
_NAME = re.compile(r"[\w.@-]{1,64}")
_NUMBERS = ("weight", "max_running", "requests_per_minute", "tokens_per_minute")


@dataclass(frozen=True)
class Key:
    """One API key.

    Attributes:
        name: is shown where the key must not be.
        digest: SHA-256 of the key.
        weight: of its tokens, where others wait as well.
        max_running: requests at once; None for any number, as below.
    """

    name: str
    digest: bytes
    weight: float = 1.0
    max_running: float | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None


ANYBODY = Key("", b"")
"""Whose requests are where there are no keys."""


class Keys:
    """The keys of a list, and of a file that is read again when it changes."""

    def __init__(
        self,
        listed: Sequence[Key],
        file: Path | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads the file.

        Raises:
            ConfigurationError: it cannot be read, or has something else in it, or there are no keys.
        """
        self._listed = tuple(listed)
        self._file = file
        self._clock = clock
        self._looked = clock()
        self._version = _version(file)
        self._keys = self._read()

    def find(self, presented: str) -> Key | None:
        """The key that this is; it takes as long whichever it is, or none."""
        self._reload()
        digest = digest_of(presented)
        matching = [key for key in self._keys if hmac.compare_digest(key.digest, digest)]
        return matching[0] if matching else None

    def _read(self) -> tuple[Key, ...]:
        keys = self._listed
        if self._file is not None:
            try:
                text = self._file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigurationError(f"OPENAI_API_KEYS_FILE: {error}") from None
            keys += parsed_keys(text, str(self._file))
        names = [key.name for key in keys]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigurationError(f"API keys: {', '.join(sorted(twice))} is there twice")
        if not keys:
            raise ConfigurationError("API keys: there are none, so that nobody could ask")
        return keys

    def _reload(self) -> None:
        """Reads the file again if it has changed. One that is wrong is named, and passed over."""
        if self._file is None or self._clock() - self._looked < RELOAD_SECONDS:
            return
        self._looked = self._clock()
        version = _version(self._file)
        if version == self._version:
            return
        self._version = version
        try:
            self._keys = self._read()
        except ConfigurationError as error:
            logger.error("%s; the keys from before stay", error.message)
        else:
            logger.info("API keys were read again: there are %d", len(self._keys))


def keys_of(listed: str, file: Path | None) -> Keys | None:
    """The keys of the settings; None if there are none, so that anybody may ask.

    Args:
        listed: keys with commas or line feeds between; each is named after its hash.

    Raises:
        ConfigurationError: see ``Keys``.
    """
    keys = [_listed_key(text) for text in re.split(r"[,\s]+", listed) if text]
    return Keys(keys, file) if keys or file is not None else None


def parsed_keys(text: str, source: str) -> tuple[Key, ...]:
    """The keys of a file's text.

    Raises:
        ConfigurationError: naming the line, but nothing of what is on it.
    """
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            keys.append(_key(words))
        except ValueError as error:
            raise ConfigurationError(f"{source}, line {number}: {error}") from None
    return tuple(keys)


def digest_of(key: str) -> bytes:
    """SHA-256 of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _key(words: Sequence[str]) -> Key:
    if len(words) < 2 or not _NAME.fullmatch(words[0]):
        raise ValueError("a name of letters, digits and ._@-, and a key or its hash are needed")
    name, key, *rest = words
    return Key(name, _digest(key), **dict(map(_number, rest)))


def _number(word: str) -> tuple[str, float]:
    name, _, text = word.partition("=")
    if name not in _NUMBERS:
        raise ValueError(f"behind the key may be {', '.join(_NUMBERS)}, each with = and a number")
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e12:
        raise ValueError(f"{name} must be a number above 0, not {shown(text)}")
    return name, value


def _listed_key(text: str) -> Key:
    digest = _digest(text)
    return Key(f"key-{digest.hex()[:8]}", digest)


def _digest(text: str) -> bytes:
    hashed = _HASH.fullmatch(text)
    return bytes.fromhex(hashed[1]) if hashed else digest_of(text)


def _version(file: Path | None) -> tuple[int, int, int] | None:
    try:
        status = file.stat() if file is not None else None
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_ino, status.st_size) if status else None
