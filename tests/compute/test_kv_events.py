"""The events of the embedded engine's KV cache, against what it holds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cog_triton.protocol.names import KV_BLOCK_TOKENS
from tests.engines import ENGINES, TIMEOUT, Requests, running
from tests.late import transformers_engine
from tests.support import wait_until

msgspec = pytest.importorskip("msgspec", reason="Dynamo is not installed: make test-dynamo")
zmq = pytest.importorskip("zmq")
pytestmark = pytest.mark.rare  # once Dynamo is installed


@dataclass
class Router:
    """A subscriber that keeps each block's tokens from the first one on, by its hash."""

    endpoint: str
    known: dict[int, list[int]] = field(default_factory=dict)
    removed = 0

    def __post_init__(self) -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.subscribe(b"")
        self.socket.connect(self.endpoint)

    def hear(self) -> Router:
        """Take all messages that have come."""
        while self.socket.poll(0):
            for event in msgspec.msgpack.decode(self.socket.recv_multipart()[2])[1]:
                blocks = event.get("block_hashes", [])
                if event["type"] == "AllBlocksCleared":
                    self.known = {}
                elif event["type"] == "BlockRemoved":
                    self.known = {i: ids for i, ids in self.known.items() if i not in blocks}
                    self.removed += 1
                else:
                    before = self.known.get(event["parent_block_hash"], [])
                    for i, block in enumerate(blocks, 1):
                        self.known[block] = before + event["token_ids"][: i * KV_BLOCK_TOKENS]
        return self


@pytest.fixture
def llm(demo_model: Path, tmp_path: Path) -> Iterator[Requests]:
    own = {
        "max_seq_len": "300",
        "max_tokens_in_paged_kv_cache": str(12 * transformers_engine.CPU_PAGE_TOKENS),
    }
    own["kv_events_endpoint"] = f"ipc://{tmp_path}/kv"
    with running(ENGINES["transformers"](demo_model), **own) as requests:
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
    wait_until(lambda: first.hear().known == late.hear().known, TIMEOUT, "the same knowledge")
    assert all(ids[0] >= 0 for ids in late.known.values())
    hashes = {*llm.engine._events._blocks.ledger.hash_to_block}  # type: ignore[attr-defined]
    assert len(hashes - late.known.keys()) <= len(marked) // transformers_engine.CPU_PAGE_TOKENS
