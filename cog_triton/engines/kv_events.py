"""The content of the transformers engine's KV cache, published by ZeroMQ in the format of vLLM's events.

A new subscriber gets the whole cache with the next change, so it may come late, and stay when the engine is
started again. Blocks of requests with adapters are left out, because no other request shares them.
"""

import time
from typing import Any

from cog_triton.protocol.names import KV_BLOCK_TOKENS

Event = dict[str, Any]

MESSAGES_BEHIND = 100_000
MEDIUM = "GPU"
_HASHES = 2**64
_SUBSCRIPTION = b"\x01"


class KvEvents:
    """Publishes the changes of one cache of transformers, from the generation thread."""

    def __init__(self, endpoint: str, cache: Any) -> None:
        """Publish the changes from now on.

        Args:
            endpoint: the address of the ZeroMQ socket.
            cache: a PagedAttentionCache whose requests share blocks.
        """
        # Both come with Dynamo and with vLLM.
        import msgspec
        import zmq

        self._encode = msgspec.msgpack.encode
        # A socket of this type receives the subscriptions.
        self._socket: Any = zmq.Context.instance().socket(zmq.XPUB)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.XPUB_VERBOSE, 1)
        self._socket.set(zmq.SNDHWM, MESSAGES_BEHIND)
        self._socket.bind(endpoint)
        self._sent = 0
        self._changes: list[Event] = []
        # The events of the blocks in the cache, by transformers' hash of the block.
        self._stored: dict[int, Event] = {}
        (self._blocks,) = cache.cache_allocators.values()
        self._mark_complete_blocks = self._blocks.mark_complete_blocks
        self._blocks.mark_complete_blocks = self._on_complete_blocks
        self._blocks.ledger.hash_to_block = _Hashes(self)

    def close(self) -> None:
        self._socket.close()

    def removed(self, block_hash: int) -> None:
        """Note that a block has left the cache."""
        event = self._stored.pop(block_hash, None)
        if event is not None:
            self._changes.append(
                {
                    "type": "BlockRemoved",
                    "block_hashes": event["block_hashes"],
                    "medium": MEDIUM,
                }
            )

    def _on_complete_blocks(self, request_id: str, ids: list[int], count: int) -> None:
        """Let transformers note a request's new blocks, and publish those that were not there."""
        self._mark_complete_blocks(request_id, ids, count)
        # If a prompt shares no blocks, its first id is below 0: see StepProcessor.prompt.
        if ids[0] >= 0:
            self._note_blocks(self._blocks.block_table[request_id], ids)
        if self._changes:
            self._publish()

    def _note_blocks(self, blocks: list[int], ids: list[int]) -> None:
        """Note the complete blocks of a request that are new in the cache."""
        size = self._blocks.tokens_per_page
        parent: int | None = None
        for number, block in enumerate(blocks):
            block_hash = self._blocks.ledger.block_to_hash.get(block)
            if block_hash is None:
                # The block is not complete, so none after it is.
                return
            if block_hash not in self._stored:
                event = stored(block_hash, parent, ids[number * size : (number + 1) * size])
                self._stored[block_hash] = event
                self._changes.append(event)
            parent = block_hash

    def _publish(self) -> None:
        """Send the changes; or the whole cache, if a subscriber has come since the last message."""
        while self._socket.poll(0):
            message = self._socket.recv()
            if message.startswith(_SUBSCRIPTION):
                self._changes = [{"type": "AllBlocksCleared"}, *self._stored.values()]
        data_parallel_rank = 0
        batch = self._encode([time.time(), self._changes, data_parallel_rank])
        self._socket.send_multipart([b"", self._sent.to_bytes(8, "big"), batch])
        self._sent += 1
        self._changes = []


def stored(block_hash: int, parent: int | None, ids: list[int]) -> Event:
    """Return the event for a new block of the cache.

    A block of the cache has more tokens than subscribers expect, so it is reported as several blocks of
    KV_BLOCK_TOKENS. The last one has the hash of the cache's block; hashes for the others are made up.
    """
    smaller_blocks = len(ids) // KV_BLOCK_TOKENS
    hashes = [(block_hash + number) % _HASHES for number in range(1, smaller_blocks)]
    return {
        "type": "BlockStored",
        "block_hashes": [*hashes, block_hash],
        "parent_block_hash": parent,
        "token_ids": ids,
        "block_size": KV_BLOCK_TOKENS,
        "medium": MEDIUM,
    }


class _Hashes(dict[int, int]):
    """Transformers' blocks by their hashes. It removes a block by ``pop``."""

    def __init__(self, events: KvEvents) -> None:
        self._events = events

    def pop(self, key: int) -> int:  # type: ignore[override]
        self._events.removed(key)
        return super().pop(key)
