"""API keys, which are kept as hashes only, and their limits.

A list of keys has one a line: a name, the key or its hash, and options:

    NAME KEY [weight=2] [max_running=8] [requests_per_minute=60] [tokens_per_minute=20000]

The hash is ``sha256:`` and 64 hexadecimal digits. Names are in the log and in the metrics; keys never are.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cog_triton.errors import ConfigurationError, shown
from cog_triton.faces.openai.errors import ApiError

logger = logging.getLogger(__name__)
RELOAD_SECONDS = 1.0
"""Between two looks at the file."""
MINUTE = 60.0
_HASH = re.compile(r"sha256:([0-9a-fA-F]{64})")
_NAME = re.compile(r"[\w.@-]{1,64}")
_OPTIONS = ("weight", "max_running", "requests_per_minute", "tokens_per_minute")


@dataclass(frozen=True)
class Key:
    """One API key, by its SHA-256. A limit that is None does not apply; ``max_running`` is of requests."""

    name: str
    digest: bytes
    weight: float = 1.0
    max_running: float | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None


ANYBODY = Key("", b"")
"""Of every request where there are no keys."""


class Keys:
    """The keys of a list, and of a file that is read again when it changes."""

    def __init__(
        self,
        listed: Sequence[Key],
        file: Path | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the file, or raise ConfigurationError; there has to be a key."""
        self._listed, self._file, self._clock = tuple(listed), file, clock
        self._looked, self._version = clock(), self._file_version()
        self._keys = self._read()

    def find(self, presented: str) -> Key | None:
        """Return the key that this is, in constant time."""
        if self._clock() - self._looked >= RELOAD_SECONDS:
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
        names = Counter(key.name for key in keys)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ConfigurationError(f"API keys: {', '.join(sorted(twice))} is there twice")
        if not keys:
            raise ConfigurationError("API keys: there are none, so that nobody could ask")
        return keys

    def _reload(self) -> None:
        self._looked = self._clock()
        if (version := self._file_version()) == self._version:
            return
        self._version = version
        try:
            self._keys = self._read()
        except ConfigurationError as error:
            logger.error("%s; the keys from before stay", error.message)
        else:
            logger.info("API keys were read again: there are %d", len(self._keys))

    def _file_version(self) -> tuple[int, int, int] | None:
        try:
            status = self._file.stat() if self._file is not None else None
        except OSError:
            return None
        return (status.st_mtime_ns, status.st_ino, status.st_size) if status else None


def keys_of(listed: str, file: Path | None) -> Keys | None:
    """Return the keys of the settings, of which those listed are named after their hashes."""
    digests = [_digest(text) for text in re.split(r"[,\s]+", listed) if text]
    keys = [Key(f"key-{digest.hex()[:8]}", digest) for digest in digests]
    return Keys(keys, file) if keys or file is not None else None


def parsed_keys(text: str, source: str) -> tuple[Key, ...]:
    """Return the keys of a file's text; an error names a line, but nothing of it."""
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            if len(words) < 2 or not _NAME.fullmatch(words[0]):
                raise ValueError(
                    "a name of letters, digits and ._@-, and a key or its hash are needed"
                )
            keys.append(Key(words[0], _digest(words[1]), **dict(map(_option, words[2:]))))
        except ValueError as error:
            raise ConfigurationError(f"{source}, line {number}: {error}") from None
    return tuple(keys)


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _digest(text: str) -> bytes:
    hashed = _HASH.fullmatch(text)
    return bytes.fromhex(hashed[1]) if hashed else digest_of(text)


def _option(word: str) -> tuple[str, float]:
    name, _, text = word.partition("=")
    if name not in _OPTIONS:
        raise ValueError(f"behind the key may be {', '.join(_OPTIONS)}, each with = and a number")
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e12:
        raise ValueError(f"{name} must be a number above 0, not {shown(text)}")
    return name, value


@dataclass
class _Bucket:
    """A limit a minute: full at first, filled evenly, below 0 where more was taken."""

    size: float
    level: float
    seen: float

    def wait(self, amount: float) -> float:
        """Return the seconds until so much is in it."""
        return max(0.0, (amount - self.level) * MINUTE / self.size)


class Quotas:
    """The use that keys have made of their limits; each of several processes has its part of these."""

    def __init__(self, processes: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._processes, self._clock = processes, clock
        self._running: Counter[str] = Counter()
        self._all: dict[tuple[str, str], _Bucket] = {}

    def enter(self, key: Key) -> None:
        """Count a request that begins, or raise 429, with the time to try again."""
        most = math.inf if key.max_running is None else math.ceil(key.max_running / self._processes)
        if self._running[key.name] >= most:
            raise _refusal("requests", f"{most} running requests", 1.0)
        buckets = self._buckets(key)
        for kind, bucket in buckets.items():
            if seconds := bucket.wait(1.0):
                raise _refusal(kind, f"{bucket.size:g} {kind} a minute", seconds)
        if "requests" in buckets:
            buckets["requests"].level -= 1
        self._running[key.name] += 1

    def leave(self, key: Key, tokens: int) -> None:
        """Count the end of a request that was let in, and the tokens that it took."""
        self._running[key.name] -= 1
        if tokens and (bucket := self._buckets(key).get("tokens")):
            bucket.level -= tokens

    def headers(self, key: Key) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's headers of a key's limits; none where it has none."""
        values = []
        for kind, bucket in self._buckets(key).items():
            values += [
                (f"limit-{kind}", f"{bucket.size:.0f}"),
                (f"remaining-{kind}", f"{max(0, math.floor(bucket.level))}"),
                (f"reset-{kind}", f"{bucket.wait(bucket.size):.3f}s"),
            ]
        return [(f"x-ratelimit-{name}".encode(), value.encode()) for name, value in values]

    def _buckets(self, key: Key) -> dict[str, _Bucket]:
        """Return a key's buckets, filled up to now; their sizes may have changed."""
        limits = {"requests": key.requests_per_minute, "tokens": key.tokens_per_minute}
        now, buckets = self._clock(), {}
        for kind, limit in limits.items():
            if limit:
                size = max(1.0, limit / self._processes)
                bucket = self._all.get((key.name, kind)) or _Bucket(size, size, now)
                level = min(size, bucket.level + (now - bucket.seen) * size / MINUTE)
                buckets[kind] = self._all[key.name, kind] = _Bucket(size, level, now)
        return buckets


def _refusal(kind: str, limit: str, seconds: float) -> ApiError:
    retry = max(1, math.ceil(seconds))
    text = f"Rate limit reached for this API key: {limit} are the most; try again in {retry} s"
    headers = {"Retry-After": str(retry)}
    return ApiError(429, text, kind, code="rate_limit_exceeded", headers=headers)
