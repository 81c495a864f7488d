"""API keys, which are kept as hashes only.

A list of keys has one a line, with its name, the key or its hash, and options; see ``LINE``. The hash is
``sha256:`` and 64 hexadecimal digits. Names are in the log and in the metrics; keys never are.
"""

import hashlib
import hmac
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from cog_triton.errors import ConfigurationError
from cog_triton.settings import Settings

logger = logging.getLogger(__name__)
RELOAD_SECONDS = 1.0
OPTIONS = "[weight=N] [max_running=N] [requests_per_minute=N] [tokens_per_minute=N]"
LINE = f"NAME KEY {OPTIONS}; names have letters, digits and ._@-, numbers are above 0"
_HASH = re.compile(r"sha256:([0-9a-fA-F]{64})")
Limit = Annotated[float, Field(gt=0, lt=1e12)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Key:
    """One API key. A limit that is None does not apply.

    Attributes:
        digest: the SHA-256 of the key itself, which is not kept.
        weight: the key's share of the queue, against that of the others.
        max_running: how many of its requests may run at once.
    """

    name: Annotated[str, Field(pattern=r"^[\w.@-]{0,64}$")]
    digest: bytes
    weight: Limit = 1.0
    max_running: Limit | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None


ANYBODY = Key("", b"")  # the key of every request on a server without keys


def configured_keys(settings: Settings) -> "Keys | None":
    """Return the keys that the settings list, or None for a server that needs none."""
    listed = settings.openai_api_keys.get_secret_value() if settings.openai_api_keys else ""
    file = settings.openai_api_keys_file
    if file is None and not listed.replace(",", " ").strip():
        return None
    return Keys(listed, file)


class Keys:
    """The keys of a list, named after their hashes, and of a file that is read again when it changes."""

    def __init__(
        self, listed: str, file: Path | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Read the file, or raise ConfigurationError; there has to be a key."""
        digests = [_digest(text) for text in re.split(r"[,\s]+", listed) if text]
        self._listed = tuple(Key(f"key-{digest.hex()[:8]}", digest) for digest in digests)
        self._file = file
        self._clock = clock
        self._checked_at = clock()
        self._version = _version_of(file)
        self._keys = self._read()

    @property
    def several(self) -> bool:
        """Whether there are several keys, or may be: a file can change."""
        return self._file is not None or len(self._listed) > 1

    def find(self, presented: str) -> Key | None:
        """Return the key that this is, in constant time."""
        digest = digest_of(presented)
        matching = [key for key in self._current() if hmac.compare_digest(key.digest, digest)]
        return matching[0] if matching else None

    def named(self, name: str) -> Key | None:
        """Return the key with a name, if it is still there."""
        for key in self._current():
            if key.name == name:
                return key
        return None

    def _read(self) -> tuple[Key, ...]:
        keys = self._listed
        if self._file is not None:
            try:
                keys += parsed_keys(self._file.read_text(encoding="utf-8"), str(self._file))
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigurationError(f"OPENAI_API_KEYS_FILE: {error}") from None
        names = Counter(key.name for key in keys)
        twice = sorted(name for name, count in names.items() if count > 1)
        if twice:
            raise ConfigurationError(f"API keys: {', '.join(twice)} appears twice")
        if not keys:
            raise ConfigurationError("no API keys configured, so every request would be refused")
        return keys

    def _current(self) -> tuple[Key, ...]:
        """Return the keys, after the file is read again if it has changed."""
        now = self._clock()
        if now - self._checked_at < RELOAD_SECONDS:
            return self._keys
        self._checked_at = now
        version = _version_of(self._file)
        if version == self._version:
            return self._keys
        self._version = version
        try:
            self._keys = self._read()
        except ConfigurationError as error:
            logger.error("%s; keeping the previous keys", error.message)
        else:
            logger.info("reloaded the API keys: there are %d now", len(self._keys))
        return self._keys


@dataclass(frozen=True)
class FileVersion:
    """What changes when a file is written or replaced."""

    modified_ns: int
    inode: int
    size: int


def _version_of(file: Path | None) -> FileVersion | None:
    """Return the version of a file; None if there is none."""
    if file is None:
        return None
    try:
        status = os.stat(file)
    except OSError:
        return None
    return FileVersion(status.st_mtime_ns, status.st_ino, status.st_size)


def parsed_keys(text: str, source: str) -> tuple[Key, ...]:
    """Return the keys of a file's text; an error names a line, but nothing of it."""
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            name, key, *words = line.split()
            options = dict(word.split("=", 1) for word in words)
            keys.append(Key(name, _digest(key), **options))  # type: ignore[arg-type]
        except (ValueError, TypeError):
            raise ConfigurationError(f"{source}, line {number}: a line is {LINE}") from None
    return tuple(keys)


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _digest(text: str) -> bytes:
    hashed = _HASH.fullmatch(text)
    return bytes.fromhex(hashed[1]) if hashed else digest_of(text)
