"""API keys, which are kept as hashes only, and their limits.

A list of keys has one a line, with its name, the key or its hash, and options; see ``LINE``. The hash is
``sha256:`` and 64 hexadecimal digits. Names are in the log and in the metrics; keys never are.
"""

import contextlib
import hashlib
import hmac
import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from cog_triton.api.openai.errors import ApiError
from cog_triton.errors import ConfigurationError
from cog_triton.settings import Settings

logger = logging.getLogger(__name__)
RELOAD_SECONDS = 1.0
MINUTE = 60.0
OPTIONS = "[weight=N] [max_running=N] [requests_per_minute=N] [tokens_per_minute=N]"
LINE = f"NAME KEY {OPTIONS}; names have letters, digits and ._@-, numbers are above 0"
_HASH = re.compile(r"sha256:([0-9a-fA-F]{64})")
Limit = Annotated[float, Field(gt=0, lt=1e12)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Key:
    """One API key, by its SHA-256. A limit that is None does not apply; ``max_running`` is of requests."""

    name: Annotated[str, Field(pattern=r"^[\w.@-]{0,64}$")]
    digest: bytes
    weight: Limit = 1.0
    max_running: Limit | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None


ANYBODY = Key("", b"")  # of every request where there are no keys


def configured_keys(settings: Settings) -> "Keys | None":
    listed = settings.openai_api_keys.get_secret_value() if settings.openai_api_keys else ""
    file = settings.openai_api_keys_file
    return Keys(listed, file) if listed.replace(",", " ").strip() or file is not None else None


class Keys:
    """The keys of a list, named after their hashes, and of a file that is read again when it changes."""

    def __init__(
        self, listed: str, file: Path | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Read the file, or raise ConfigurationError; there has to be a key."""
        digests = [_digest(text) for text in re.split(r"[,\s]+", listed) if text]
        self._listed = tuple(Key(f"key-{digest.hex()[:8]}", digest) for digest in digests)
        self._file, self._clock, self._checked = file, clock, clock()
        self._version = _version(file)
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
        """Return the key of a name, if it is still there."""
        return next((key for key in self._current() if key.name == name), None)

    def _read(self) -> tuple[Key, ...]:
        keys = self._listed
        if self._file is not None:
            try:
                keys += parsed_keys(self._file.read_text(encoding="utf-8"), str(self._file))
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigurationError(f"OPENAI_API_KEYS_FILE: {error}") from None
        names = Counter(key.name for key in keys)
        if twice := sorted(name for name, count in names.items() if count > 1):
            raise ConfigurationError(f"API keys: {', '.join(twice)} appears twice")
        if not keys:
            raise ConfigurationError("no API keys configured, so every request would be refused")
        return keys

    def _current(self) -> tuple[Key, ...]:
        if self._clock() - self._checked < RELOAD_SECONDS:
            return self._keys
        self._checked, before = self._clock(), self._version
        self._version = _version(self._file)
        try:
            if self._version != before:
                self._keys = self._read()
                logger.info("reloaded the API keys: there are %d now", len(self._keys))
        except ConfigurationError as error:
            logger.error("%s; keeping the previous keys", error.message)
        return self._keys


def _version(file: Path | None) -> tuple[int, int, int] | None:
    with contextlib.suppress(OSError):
        status = os.stat(file or "")
        return status.st_mtime_ns, status.st_ino, status.st_size
    return None


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


class Quotas:
    """The use that keys have made of their limits; each of several processes has its part of these.

    A limit a minute is a bucket: full at first, filled evenly, and below 0 where more was taken.
    """

    def __init__(self, processes: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._processes, self._clock = processes, clock
        self._running: Counter[str] = Counter()
        self._levels: dict[tuple[str, str], tuple[float, float]] = {}  # and when that was

    def enter(self, key: Key) -> None:
        """Count a request that begins, or raise 429, with the time to try again."""
        most = math.ceil(key.max_running / self._processes) if key.max_running else math.inf
        if self._running[key.name] >= most:
            raise _refusal("requests", f"{most} running requests", 1.0)
        for kind, (size, level) in self._buckets(key).items():
            if level < 1:
                raise _refusal(kind, f"{size:g} {kind} per minute", (1 - level) * MINUTE / size)
        self._running[key.name] += 1
        self._take(key, "requests", 1)

    def leave(self, key: Key, tokens: int) -> None:
        """Count the end of a request that was let in, and the tokens that it took."""
        self._running[key.name] -= 1
        self._take(key, "tokens", tokens)

    def spend(self, key: Key, tokens: int) -> float:
        """Count tokens of a key's batches; return the seconds until it may have more."""
        self._take(key, "tokens", tokens)
        size, level = self._buckets(key).get("tokens", (1.0, 1.0))
        return max(0.0, (1 - level) * MINUTE / size)

    def headers(self, key: Key) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's headers of a key's limits; none where it has none."""
        headers = {}
        for kind, (size, level) in self._buckets(key).items():
            headers[f"x-ratelimit-limit-{kind}"] = f"{size:.0f}"
            headers[f"x-ratelimit-remaining-{kind}"] = f"{max(0, math.floor(level))}"
            headers[f"x-ratelimit-reset-{kind}"] = f"{(size - level) * MINUTE / size:.3f}s"
        return [(name.encode(), value.encode()) for name, value in headers.items()]

    def _buckets(self, key: Key) -> dict[str, tuple[float, float]]:
        """Return a key's buckets by their kinds: the size, which may have changed, and the level now."""
        limits = {"requests": key.requests_per_minute, "tokens": key.tokens_per_minute}
        now, buckets = self._clock(), {}
        for kind, limit in limits.items():
            if limit is not None:
                size = max(1.0, limit / self._processes)
                level, then = self._levels.get((key.name, kind), (size, now))
                buckets[kind] = size, min(size, level + (now - then) * size / MINUTE)
        return buckets

    def _take(self, key: Key, kind: str, amount: float) -> None:
        if bucket := self._buckets(key).get(kind):
            self._levels[key.name, kind] = bucket[1] - amount, self._clock()


def _refusal(kind: str, limit: str, seconds: float) -> ApiError:
    retry = max(1, math.ceil(seconds))
    text = f"Rate limit reached for this API key: the limit is {limit}; try again in {retry} s"
    headers = {"Retry-After": str(retry)}
    return ApiError(429, text, kind, code="rate_limit_exceeded", headers=headers)
