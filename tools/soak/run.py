"""A soak: start the servers, put load on them, kill parts of them, and report."""

import asyncio
import json
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import httpx

from cog_triton.cli import batch
from cog_triton.settings import read_settings
from tools.benchmark import targets as ways
from tools.benchmark.processes import free_port
from tools.benchmark.servers import api_server
from tools.benchmark.targets import Endpoints
from tools.command_line import begin, environment, progress
from tools.server_sent_events import CUT
from tools.soak.command import Options
from tools.soak.load import RETRYABLE, SILENCE_SECONDS, Streams, Targets, pool
from tools.soak.report import report_of
from tools.soak.watch import GUARD, WORKER, Phase

KINDS: dict[str, dict[str, str]] = {"cog": {}, "openai": {}, "cog-http": {"TRANSPORT": "http"}}
"""Cog's server with OpenAI's API beside it, or OpenAI's API in two processes; their settings."""
# Makes of a chat the tokens of its prompt, so that every target has the same answers.
CHAT_TEMPLATE = "{{ bos_token }}{{ messages[0]['content'] }}"
DEFAULTS = {"SIMULATED_INTER_TOKEN_MS": "30", "CHAT_TEMPLATE": CHAT_TEMPLATE}
# A kill every few seconds is more than anybody's policy allows for.
CHAOS = {"TRITON_RESTARTS": "1000000", "RESUME_ATTEMPTS": "100", "RESUME_TIMEOUT": "120"}
POOL = 64
LINES, FIRST_BATCHES = 200, 6  # of a batch; at once, and then one after another
RUNNING = ("queued", "in_progress")
LEAST_SECONDS = 60.0  # of a phase: a process is to be judged by its memory in it
LOOK_SECONDS = 0.25
PAUSE = 6.0  # most seconds between a recovery and the next kill
HASTY_SHARE, HASTE = 0.15, 10.0  # of the kills, which do not wait for a recovery so long; seconds
MOMENT = 0.5  # from the start of a server, for which tokens of the last one may be under way
BACK_SECONDS = 120.0  # from a kill until streams run again
IDLE_SECONDS = 30.0  # for which the engine may go on with what nobody waits for
_ACTIVE = re.compile(r"^cog_triton_engine_active_requests(?:{.*})? (\S+)$", re.MULTILINE)


def main(options: Options) -> int:
    """Run the soak and write its report; return 1 if a goal was missed."""
    begin()
    options.chaos = options.chaos or options.kills is not None
    settings = {**DEFAULTS, **(CHAOS if options.chaos else {}), **environment(options.settings)}
    for engine in options.engine:  # a mistake in them comes before anything is started
        read_settings({**settings, "ENGINE": engine})
    plan = phases(options.engine, options.kind, 60 * options.minutes, options.kills)
    for number, phase in enumerate(plan, 1):
        much = f"{phase.seconds:.0f} s" if phase.kills is None else f"{phase.kills} kills"
        progress(f"{number}/{len(plan)}: {phase.engine}, {phase.kind}, {much}")
        log = options.artifact_dir / f"{number}-{phase.engine}-{phase.kind}.log"
        run_phase(phase, options, settings, log)
        if phase.interrupted:
            progress("interrupted: the report is of what came until then")
            plan = plan[:number]
            break
    report, file = report_of(plan, settings), options.artifact_dir / "soak.json"
    report.publish(file)
    print(file)
    return int(not report.met)


def phases(
    engines: Sequence[str], kinds: Sequence[str], seconds: float, kills: int | None
) -> list[Phase]:
    """Plan as many phases as have time enough, with equal shares; engines and kinds take turns."""
    turns = [
        (engines[(turn + place) % len(engines)], kind)
        for turn in range(len(engines))
        for place, kind in enumerate(kinds)
    ]
    chosen = turns[: max(1, int(seconds // LEAST_SECONDS)) if kills is None else kills]
    count = len(chosen)
    # Whole numbers of kills that differ by one at most, and are as many as asked for together.
    shares = [None if kills is None else (kills + number) // count for number in range(count)]
    return [
        Phase(*names, seconds / count, share) for names, share in zip(chosen, shares, strict=True)
    ]


def run_phase(phase: Phase, options: Options, settings: Mapping[str, str], log: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="cog-triton-soak-") as temporary:
        given = {**settings, **KINDS[phase.kind], "ENGINE": phase.engine, "TMPDIR": temporary}
        given["STORE"] = f"{log.resolve().with_suffix('')}/journal.db"
        openai_port = free_port()
        if phase.kind == "openai":
            server = api_server("openai", given, log, "--workers", "2")
        else:
            given |= {"OPENAI_PORT": str(openai_port), "OPENAI_HOST": "127.0.0.1"}
            server = api_server("cog", given, log)
        with server as endpoints:
            asyncio.run(_load(phase, endpoints, openai_port, options))
        phase.left = phase.watch.leftovers(Path(temporary))


async def _load(phase: Phase, endpoints: Endpoints, openai_port: int, options: Options) -> None:
    async with _targets(phase.kind, endpoints, openai_port) as targets:
        cases = pool(POOL, options.seed, guided=phase.engine != "simulated")
        streams = Streams(targets, cases, options.seed)
        await streams.expect()
        phase.tally, stopping = streams.tally, streams.stopping
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            phase.interrupted = True
            stopping.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        phase.began = time.time()
        looking = asyncio.create_task(_look(phase))
        url = endpoints.url if phase.kind == "openai" else f"http://127.0.0.1:{openai_port}"
        batches = asyncio.to_thread(_work, url, streams.tally.counts, stopping)
        running = set(map(asyncio.create_task, (streams.run(options.streams), batches)))
        if phase.kills is None:
            loop.call_later(phase.seconds, stopping.set)
        if options.chaos:
            killing = asyncio.create_task(_kill_parts(phase, options.seed, stopping))
            killing.add_done_callback(lambda _: stopping.set())
            running.add(killing)
        await stopping.wait()
        ended, late = await asyncio.wait(running, timeout=SILENCE_SECONDS + BACK_SECONDS)
        if late:
            phase.unfinished.append("streams did not come to their end")
        for task in (looking, *late):
            task.cancel()
        await asyncio.gather(looking, *late, return_exceptions=True)
        await asyncio.gather(*ended)  # to raise what failed
    phase.ended = time.time()
    phase.watch.sample()
    if active := await _active_after(endpoints.metrics, IDLE_SECONDS):
        phase.unfinished.append(f"{active:g} requests ran in the engine {IDLE_SECONDS:g} s later")


def _work(url: str, counts: Counter[str], stopping: asyncio.Event) -> None:
    """Have batches and background responses answered until it is time to stop.

    Counted are the lines that are not answered once, and the responses that are not as the first one.
    """

    def again(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        for _ in range(round(BACK_SECONDS / LOOK_SECONDS)):
            with suppress(OSError):
                return call(client, *arguments, **options)
            time.sleep(LOOK_SECONDS)
        return call(client, *arguments, **options)

    def ended(id: str) -> tuple[str, str]:
        while True:
            response = again(batch.ask, "GET", f"/v1/responses/{id}").json()
            if response["status"] not in RUNNING:
                break
            time.sleep(LOOK_SECONDS)
        texts = [item["content"][0]["text"] for item in response["output"]]
        return response["status"], "".join(texts)

    # Without keep-alive, any of the processes gets the next request: each grows with its first batch.
    options: Any = {"headers": {"Connection": "close"}, "timeout": BACK_SECONDS}
    with httpx.Client(base_url=url, trust_env=False, **options) as client:
        path, body = "/v1/completions", {"prompt": "Hello", "max_tokens": 64}
        asked = {"method": "POST", "url": path, "body": body}
        background = {
            "input": "Hello",
            "temperature": 0,
            "max_output_tokens": 64,
            "background": True,
        }
        first = None  # the first background response, which all others have to equal
        many = FIRST_BATCHES
        lines = "\n".join(json.dumps({"custom_id": str(n), **asked}) for n in range(LINES)).encode()
        while not stopping.is_set():
            begun = [again(batch.ask, "POST", "/v1/responses", json=background) for _ in range(8)]
            names = [again(batch.begin, path, lines) for _ in range(many)]
            for done in again(batch.wait, names, many * LINES):
                came = Counter(
                    name for (_, name), _ in again(lambda *own: [*batch.results(*own)], done)
                )
                counts.update(lines=LINES, unanswered=sum(came[str(n)] != 1 for n in range(LINES)))
            many = 1
            texts = [ended(reply.json()["id"]) for reply in begun]
            first = first or texts[0]
            counts.update(background=len(texts), changed=sum(own != first for own in texts))


async def _look(phase: Phase) -> None:
    while True:
        phase.watch.sample()
        await asyncio.sleep(LOOK_SECONDS)


async def _kill_parts(phase: Phase, seed: int, stopping: asyncio.Event) -> None:
    """Kill parts until there are enough; each but the hasty ones once streams run again."""
    random = Random(f"{seed} {phase.engine} {phase.kind}")
    while True:
        await asyncio.sleep(random.random() * PAUSE)
        if stopping.is_set():
            return
        if (victim := phase.watch.kill(random)) is None:
            continue
        at = time.time()
        recovery = {"killed": victim.kind, "at": at - phase.began, "token_s": None}
        phase.recoveries.append(recovery)
        enough = phase.kills is not None and len(phase.recoveries) >= phase.kills
        if not enough and random.random() < HASTY_SHARE:
            await asyncio.sleep(random.random() * HASTE)
            continue
        role = WORKER if victim.kind == WORKER else GUARD
        # Streams run again when a part has started since, and a token came after that: within a moment of
        # the start, it may still be one of the part before.
        while not any(
            at < part.started < phase.tally.last_token - MOMENT for part in phase.watch.of(role)
        ):
            if time.time() - at > BACK_SECONDS:
                phase.unfinished.append(f"the server was not back after {victim.kind} was killed")
                return
            await asyncio.sleep(LOOK_SECONDS)
        recovery["token_s"] = phase.tally.last_token - at
        if enough:
            return


@asynccontextmanager
async def _targets(kind: str, endpoints: Endpoints, openai_port: int) -> AsyncIterator[Targets]:
    """Connect to a server by each of its ways; with the errors by which it may break off an answer."""
    if kind == "openai":  # of whose processes one may be killed with its connections
        made = [ways.OpenAiSse(endpoints), ways.OpenAiJson(endpoints)]
        targets: Targets = dict.fromkeys(made, (CUT,))
    else:
        beside = replace(endpoints, url=f"http://127.0.0.1:{openai_port}")
        models = httpx.get(f"{beside.url}/v1/models", trust_env=False).json()
        beside = replace(beside, model=models["data"][0]["id"])
        whole = [ways.CogSse(endpoints), ways.CogJson(endpoints), ways.OpenAiSse(beside)]
        targets = dict.fromkeys(whole, ()) | {ways.TritonGrpc(endpoints): RETRYABLE}
    try:
        yield targets
    finally:
        for target in targets:
            await target.close()


async def _active_after(metrics: str, seconds: float) -> float:
    """Return the number of requests in the engine after a time, or 0 once it has none."""
    deadline = time.time() + seconds
    while True:
        page = httpx.get(f"http://{metrics}/metrics", trust_env=False).text
        active = sum(map(float, _ACTIVE.findall(page)))
        if not active or time.time() > deadline:
            return active
        await asyncio.sleep(LOOK_SECONDS)
