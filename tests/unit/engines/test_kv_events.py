"""The events of the embedded engine's KV cache, against what it holds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cog_triton.engines.transformers import CPU_PAGE_TOKENS
from cog_triton.wire import KV_BLOCK_TOKENS
from tests.support import wait_until
from tests.unit.engines.conftest import ENGINES, TIMEOUT, Requests, running

msgspec = pytest.importorskip("msgspec", reason="Dynamo is not installed: make test-dynamo")
zmq = pytest.importorskip("zmq")

CACHE_TOKENS = 12 * CPU_PAGE_TOKENS


@dataclass
class Router:
    """A subscriber that keeps each block's tokens from the first one on, by its hash."""

    endpoint: str
    known: dict[int, list[int]] = field(default_factory=dict)
    removed = cleared = 0

    def __post_init__(self) -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.subscribe(b"")
        self.socket.connect(self.endpoint)

    def hear(self) -> Router:
        """Take all messages that have come."""
        while self.socket.poll(0):
            for event in msgspec.msgpack.decode(self.socket.recv_multipart()[2])[1]:
                self.take(**event)
        return self

    def take(self, type: str, block_hashes: tuple[int, ...] = (), **stored: Any) -> None:
        if type == "AllBlocksCleared":
            self.known, self.cleared = {}, self.cleared + 1
        elif type == "BlockRemoved":
            self.removed += 1
            for block in block_hashes:
                del self.known[block]
        else:
            assert stored["block_size"] == KV_BLOCK_TOKENS
            before = self.known.get(stored["parent_block_hash"], [])
            for number, block in enumerate(block_hashes, 1):
                self.known[block] = before + stored["token_ids"][: number * KV_BLOCK_TOKENS]


@pytest.fixture
def llm(demo_model: Path, tmp_path: Path) -> Iterator[Requests]:
    small = {"max_seq_len": "300", "max_tokens_in_paged_kv_cache": str(CACHE_TOKENS)}
    endpoint = {"kv_events_endpoint": f"ipc://{tmp_path}/kv"}
    with running({**ENGINES["transformers"](demo_model), **small, **endpoint}) as requests:
        yield requests


def test_subscribers_know_the_cache_whenever_they_come(llm: Requests, tmp_path: Path) -> None:
    prompts = ([one, *random.Random(one).choices(range(100), k=200)] for one in range(1000))

    def subscribe() -> Router:
        router = Router(f"ipc://{tmp_path}/kv")
        while not router.socket.poll(100):  # its subscription may be on its way
            llm.ids(next(prompts), max_tokens=2)
        return router.hear()

    first, prompt = subscribe(), next(prompts)
    ids = [*prompt, *llm.ids(prompt, max_tokens=60)][:256]
    wait_until(lambda: ids in first.hear().known.values(), TIMEOUT, "a prompt with its answer")
    while not first.hear().removed:
        llm.ids(next(prompts), max_tokens=2)
    marked = next(prompts)  # it shares no block
    llm.ids(marked, max_tokens=2, return_log_probs=True, prompt_log_probs=True)
    late = subscribe()
    assert late.cleared
    wait_until(lambda: first.hear().known == late.hear().known, TIMEOUT, "the same knowledge")
    assert all(ids[0] >= 0 for ids in late.known.values())
    engine: Any = llm.engine
    hashes = {*engine._events._blocks.ledger.hash_to_block}
    assert len(hashes - late.known.keys()) <= len(marked) // CPU_PAGE_TOKENS
