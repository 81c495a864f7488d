"""Kinds of answers, by parts that are killed while they run: each is as without the kill, id by id."""

import asyncio
import contextlib
import json
import math
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from tests.adapters import make_adapter
from tests.integration.resuming_requests import REQUESTS
from tests.integration.test_recovery import part_name
from tests.late import torch, transformers
from tests.support import (
    CogServer,
    QuietHandler,
    children,
    free_port,
    http_server,
    wait_until,
)

pytestmark = pytest.mark.anyio
SECONDS = 300
KILLS = int(os.environ.get("RESUMING_KILLS", "20"))  # of each part
# What is drawn or counted in time, and what each event repeats.
DROPPED = {"id", "item_id", "created", "created_at", "completed_at", "model", "object", "type"}
DROPPED |= {"sequence_number", "system_fingerprint", "prompt_token_ids"}
LASTING = {"TRITON_RESTARTS": "1000", "RESUME_ATTEMPTS": "10", "RESUME_TIMEOUT": str(SECONDS)}


def folded(a: Any, b: Any) -> Any:
    """Two events as one: their texts and lists joined, and parts of one ``index`` folded."""
    if a is None or b is None or type(a) is not type(b):
        return a if b is None else b
    if isinstance(a, dict):
        return {name: folded(a.get(name), b.get(name)) for name in {**a, **b}}
    if isinstance(a, list) and any(isinstance(item, dict) and "index" in item for item in a + b):
        items = {item["index"]: item for item in a}
        for item in b:
            items[item["index"]] = folded(items.get(item["index"]), item) | {"index": item["index"]}
        return [items[place] for place in sorted(items)]
    both: Any = a
    return both + b if isinstance(both, (str, list)) else b


def kept(value: Any) -> Any:
    """What of an answer is the same each time."""
    if isinstance(value, dict):
        return {name: kept(own) for name, own in value.items() if name not in DROPPED}
    return [kept(item) for item in value] if isinstance(value, list) else value


def same(a: Any, b: Any) -> bool:
    """Whether two answers are equal, and their numbers as nearly as the engines compute them."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, abs_tol=1e-3)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class Asked:
    """All kinds of one server, asked at once; ``on_event`` gets the kind at each event of a stream."""

    def __init__(self, server: CogServer, hooks: str, names: list[str]) -> None:
        self.server, self._hooks, self.names = server, hooks, names
        openai_port = server.environment["OPENAI_PORT"]
        self._urls = {"cog": server.url, "openai": f"http://127.0.0.1:{openai_port}/v1"}
        self.webhook: asyncio.Future[Any]
        self.running: set[str] = set()

    async def answers(self, on_event: Callable[[str], object]) -> dict[str, Any]:
        self.webhook = asyncio.get_running_loop().create_future()
        self.running = set(self.names)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(trust_env=False, timeout=SECONDS, limits=limits) as client:
            tasks = [self._answer(client, name, on_event) for name in self.names]
            return dict(zip(self.names, await asyncio.gather(*tasks), strict=True))

    async def _answer(
        self, client: httpx.AsyncClient, name: str, on_event: Callable[[str], object]
    ) -> Any:
        request = REQUESTS[name]
        body = request.body
        if request.has_webhook:
            body = {**body, "webhook": self._hooks, "webhook_events_filter": ["completed"]}
        url = f"{self._urls[request.api]}/{request.path}"
        whole: Any = None
        async with client.stream("POST", url, json=body, headers=request.headers) as reply:
            if "event-stream" not in reply.headers["content-type"]:
                whole = json.loads(await reply.aread())
                assert reply.is_success, (name, whole)
            else:
                async for line in reply.aiter_lines():
                    # Which counts the tokens that came with it.
                    if line.startswith("data: {") and '"message_start"' not in line:
                        on_event(name)
                        event = json.loads(line[6:])
                        assert not event.get("error"), (name, event)
                        whole = folded(whole, kept(event))
        if whole.get("status") == "starting":
            whole = await self.webhook
        if "metrics" in whole:  # Cog's, whose chunks are as they come
            output = "".join(whole.get("output") or whole.get("chunk") or [])
            counts = {n: v for n, v in whole["metrics"].items() if "count" in n or "reason" in n}
            whole = {"output": output, **counts, "status": whole["status"]}
        self.running.discard(name)
        return kept(whole)


@contextmanager
def serving(model: Path, directory: Path, names: list[str], **environment: str) -> Iterator[Asked]:
    """Cog's server with OpenAI's API, and a receiver of webhooks."""
    template = (model / "chat_template.jinja").read_text()
    template += "{% if enable_thinking %}<think>{% endif %}{# </think> #}"
    given = {"MODEL": str(model), "OPENAI_PORT": str(free_port()), "CHAT_TEMPLATE": template}
    loop = asyncio.get_running_loop()

    class Hook(QuietHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            loop.call_soon_threadsafe(asked.webhook.set_result, body)
            self.send_response(200)
            self.end_headers()

    with (
        http_server(Hook) as hooks,
        CogServer({**given, **LASTING, **environment}, directory / "log") as server,
    ):
        server.wait_until_ready()
        asked = Asked(server, hooks, names)
        yield asked


async def kill_while_all_run(asked: Asked, parts: list[str], kills: int) -> None:
    """Kill the parts in turn, some in a run, at random moments, and compare what came each time."""
    dice, moments, hit = random.Random(0), list[int](), Counter[str]()
    streams, since = set[str](), Counter[str]()  # events of each since the last kill
    events = killed = 0

    def on_event(name: str) -> None:
        nonlocal events, killed
        events += 1
        streams.add(name)
        since[name] += 1
        # A request that ends two servers before its first token would not be tried again; of whole answers
        # that is not seen, and they begin with the others.
        begun = all(since[own] > 8 for own in streams & asked.running)
        if begun and moments and events >= moments[0]:
            del moments[0]
            since.clear()
            os.kill(victim(asked.server, parts[killed % len(parts)]), signal.SIGKILL)
            hit.update(asked.running)
            killed += 1

    def tried() -> int:
        return asked.server.log.read_text().count("resuming request")

    uninterrupted = await asked.answers(on_event)
    assert len({repr(answer) for answer in uninterrupted.values()}) == len(asked.names)
    last = events // 2
    for _ in range(5 * kills):
        events, before, tried_before = 0, killed, tried()
        moments += sorted(dice.sample(range(len(asked.names), last), min(4, kills - killed)))
        answers = await asyncio.wait_for(asked.answers(on_event), SECONDS)
        for name in asked.names:
            both = uninterrupted[name], answers[name]
            assert same(*both), (name, parts, killed, *both)
        moments.clear()
        since.clear()
        if tried() == tried_before:  # The server had finished all before it was killed.
            killed = before
        if killed == kills:
            break
    assert killed == kills
    assert len(hit) == len(asked.names) or kills < 10, hit
    assert tried() >= kills


def victim(server: CogServer, part: str) -> int:
    """The process of a part of a server that may still be starting."""

    def found() -> int | None:
        for pid in children(server.process.pid):
            with contextlib.suppress(psutil.Error, IndexError):
                if part_name(pid) == ("tensorrt_llm" if part == "engine core" else part):
                    below = psutil.Process(pid).children()
                    core = [p.pid for p in below if "resource_tracker" not in str(p.cmdline())]
                    return core[0] if part == "engine core" else pid
        return None

    return int(wait_until(found, SECONDS, part))


async def kill_on_transformers(model: Path, directory: Path, parts: list[str], kills: int) -> None:
    """With weights in double precision: how a sum is rounded depends on the batch."""
    double = directory / "demo"
    shutil.copytree(model, double)
    transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).save_pretrained(
        double
    )
    make_adapter(model, directory / "adapters" / "poet", seed=1)
    environment = {"ENGINE": "transformers", "LORA_DIR": str(directory / "adapters")}
    with serving(double, directory, [*REQUESTS], **environment) as asked:
        await kill_while_all_run(asked, parts, kills)


@pytest.mark.rare
async def test_every_kind_goes_on_when_a_part_dies(demo_model: Path, tmp_path: Path) -> None:
    await kill_on_transformers(demo_model, tmp_path, ["tensorrt_llm", "tritonserver"], 2)


@pytest.mark.rare
@pytest.mark.parametrize("part", ["tensorrt_llm", "tritonserver"])
async def test_at_any_token(demo_model: Path, tmp_path: Path, part: str) -> None:
    await kill_on_transformers(demo_model, tmp_path, [part], KILLS)
