"""The content of the embedded engine's KV cache, published by ZeroMQ as vLLM's KV cache events.

A new subscriber gets the whole cache with the next change, so that it may come late, and stay when the
engine has been started anew. Blocks of adapters' requests are left out: no other request shares them.
"""

import time
from typing import Any

from cog_triton.protocol.names import KV_BLOCK_TOKENS

Event = dict[str, Any]


class KvEvents:
    """The events of one cache of transformers'; all but the start happens on the generation thread."""

    def __init__(self, endpoint: str, cache: Any) -> None:
        """Publish the changes of a PagedAttentionCache whose requests share blocks, from now on."""
        import msgspec  # both come with Dynamo and with vLLM
        import zmq

        self._encode = msgspec.msgpack.encode
        self._socket: Any = zmq.Context.instance().socket(zmq.XPUB)  # which is told of subscribers
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.XPUB_VERBOSE, 1)
        self._socket.set(zmq.SNDHWM, 100_000)  # messages that a subscriber may be behind
        self._socket.bind(endpoint)
        self._sent, self._changes = 0, list[Event]()
        self._stored: dict[int, Event] = {}  # by transformers' hash of a block
        (self._blocks,) = cache.cache_allocators.values()
        self._mark = self._blocks.mark_complete_blocks
        self._blocks.mark_complete_blocks = self._marked
        self._blocks.ledger.hash_to_block = _Hashes(self)

    def close(self) -> None:
        self._socket.close()

    def removed(self, block_hash: int) -> None:
        if (event := self._stored.pop(block_hash, None)) is not None:
            hashes = event["block_hashes"]
            self._changes.append({"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"})

    def _marked(self, request_id: str, ids: list[int], count: int) -> None:
        """Let transformers note a request's new blocks, and publish those that were not there."""
        self._mark(request_id, ids, count)
        parent, size = None, self._blocks.tokens_per_page
        own = [] if ids[0] < 0 else self._blocks.block_table[request_id]  # see StepProcessor.prompt
        for number, block in enumerate(own):
            if (block_hash := self._blocks.ledger.block_to_hash.get(block)) is None:
                break
            if block_hash not in self._stored:
                event = stored(block_hash, parent, ids[number * size : (number + 1) * size])
                self._stored[block_hash] = event
                self._changes.append(event)
            parent = block_hash
        if self._changes:
            self._publish()

    def _publish(self) -> None:
        while self._socket.poll(0):
            if self._socket.recv()[:1] == b"\x01":  # a subscription
                self._changes = [{"type": "AllBlocksCleared"}, *self._stored.values()]
        batch = self._encode([time.time(), self._changes, 0])
        self._socket.send_multipart([b"", self._sent.to_bytes(8, "big"), batch])
        self._sent, self._changes = self._sent + 1, []


def stored(block_hash: int, parent: int | None, ids: list[int]) -> Event:
    """Return the event of a block of transformers' as that of smaller ones, the last under its hash."""
    smaller = range(1, len(ids) // KV_BLOCK_TOKENS)
    return {
        "type": "BlockStored",
        "block_hashes": [*((block_hash + number) % 2**64 for number in smaller), block_hash],
        "parent_block_hash": parent,
        "token_ids": ids,
        "block_size": KV_BLOCK_TOKENS,
        "medium": "GPU",
    }


class _Hashes(dict[int, int]):
    """Blocks by their hashes; transformers forgets one by ``pop``, and all only before it starts."""

    def __init__(self, events: KvEvents) -> None:
        self._events = events

    def pop(self, key: int) -> int:  # type: ignore[override]
        self._events.removed(key)
        return super().pop(key)
