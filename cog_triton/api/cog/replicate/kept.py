"""What the API keeps in memory for a while: predictions and files."""

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

KEPT = 1000
KEPT_BYTES = 64 << 20


class Keepable(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def size(self) -> int:
        """Bytes that it takes, roughly."""

    @property
    def can_go(self) -> bool:
        """Whether it may be dropped for the sake of newer ones."""


T = TypeVar("T", bound=Keepable)


class Kept(Generic[T]):
    """The newest items, by id: at most ``KEPT`` with ``KEPT_BYTES``, beside those that cannot go."""

    def __init__(self) -> None:
        self._items: dict[str, T] = {}

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: T) -> None:
        """Keep an item, and drop the oldest that can go while there are too many or too large ones."""
        self._items[item.id] = item
        size = sum(each.size for each in self._items.values())
        for oldest in [each for each in self._items.values() if each.can_go]:
            if len(self._items) <= KEPT and size <= KEPT_BYTES:
                return
            del self._items[oldest.id]
            size -= oldest.size

    def get(self, identifier: str) -> T | None:
        return self._items.get(identifier)

    def remove(self, identifier: str) -> None:
        del self._items[identifier]

    def newest(self, count: int) -> Iterator[T]:
        """Yield the newest items, the last one first."""
        items = list(self._items.values())
        return reversed(items[-count:])
