"""Dynamo's frontends and our workers on two machines: this one, and a network namespace beside it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from tests.integration.test_dynamo import Failed, streamed, texts
from tests.support import START_TIMEOUT, limit, wait_until

pytestmark = pytest.mark.rare
if os.geteuid() or not shutil.which("ip"):
    pytest.skip("network namespaces need root and iproute2", allow_module_level=True)

HERE, THERE = 0, 1
PORT = 8080
SECONDS = 90.0
LOAD = int(os.environ.get("STREAMS", "160"))  # a thousand by make test-dynamo
AT_ONCE, KILL_SECONDS = 64, 3.0 if LOAD < 1000 else 10.0
PLANES = ("--request-plane", "tcp", "--event-plane", "zmq", "--migration-limit", "3")


@dataclass
class Machines:
    """Two machines, each with a worker and a frontend that know each other by etcd or by a directory."""

    discovery: str
    model: Path
    directory: Path
    processes: dict[tuple[str, int], subprocess.Popen[bytes]] = field(default_factory=dict)
    killed: set[int] = field(default_factory=set)
    starts: list[int] = field(default_factory=lambda: [1, 1])  # of their tritonservers
    uninterrupted: list[str] = field(default_factory=list)  # of ``under_load``

    def __post_init__(self) -> None:
        self.namespace, self.link = f"there-{os.getpid()}", f"veth{os.getpid()}"
        self.addresses = [f"10.213.{os.getpid() % 256}.{i}" for i in (1, 2)]

    def ip(self, command: str) -> None:
        subprocess.run(["ip", *command.split()], check=True, capture_output=True)

    def connect(self) -> None:
        inside = f"-n {self.namespace}"
        self.ip(f"netns add {self.namespace}")
        self.ip(f"link add {self.link} type veth peer name eth0 netns {self.namespace}")
        self.ip(f"address add {self.addresses[HERE]}/30 dev {self.link}")
        self.ip(f"{inside} address add {self.addresses[THERE]}/30 dev eth0")
        for command in (f"link set {self.link} up", f"{inside} link set lo up"):
            self.ip(command)
        self.ip(f"{inside} link set eth0 up")

    def command(self, part: str, machine: int) -> list[str]:
        discovery = ("--discovery-backend", self.discovery)
        if part == "etcd":
            clients, peers = (f"http://{self.addresses[HERE]}:{port}" for port in (2379, 2380))
            served = ("--listen-client-urls", clients, "--advertise-client-urls", clients)
            return ["etcd", "--data-dir", "etcd", *served, "--listen-peer-urls", peers]
        if part == "worker":
            return [str(Path(sys.executable).with_name("cog-triton")), "worker", *discovery]
        listening = ("--http-host", self.addresses[machine], "--http-port", str(PORT))
        return [sys.executable, "-m", "dynamo.frontend", *listening, *discovery, *PLANES]

    def start(self, part: str, machine: int) -> None:
        hosts = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST")
        environment = {
            **os.environ,
            **dict.fromkeys(hosts, self.addresses[machine]),
            **{f"TRITON_{port}_PORT": "0" for port in ("HTTP", "GRPC", "METRICS")},
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1",
            "ETCD_ENDPOINTS": f"http://{self.addresses[HERE]}:2379",
            "DYN_FILE_KV": str(self.directory / "discovery"),
            "MODEL": str(self.model),
            "ENGINE": "transformers",
            "RESUME_TIMEOUT": "300",
        }
        command = self.command(part, machine)
        if machine == THERE:
            command = ["ip", "netns", "exec", self.namespace, *command]
        with (self.directory / f"{part}-{machine}.log").open("ab") as log:
            started = subprocess.Popen(
                command, env=environment, cwd=self.directory, stdout=log, stderr=log
            )
        self.processes[part, machine] = started

    def url(self, machine: int) -> str:
        return f"http://{self.addresses[machine]}:{PORT}"

    def workers(self, machine: int = HERE) -> dict[int, str]:
        """Return the workers that a frontend lists; killed ones stay in its list for a while."""
        try:
            with httpx.Client(trust_env=False, timeout=5, base_url=self.url(machine)) as client:
                listed = client.get("/v1/models").json()["data"]
                instances = client.get("/health").json()["instances"] if listed else []
        except (httpx.TransportError, KeyError, ValueError):
            return {}
        serving = [one for one in instances if one["endpoint"] == "generate"]
        found = {one["instance_id"]: json.dumps(one) for one in serving}
        return {i: one for i, one in found.items() if i not in self.killed}

    def wait_until_serving(self) -> None:
        """Wait until both frontends list both workers, and their tritonservers are there again."""

        def serving() -> bool:
            logs = [self.directory / f"worker-{machine}.log" for machine in (HERE, THERE)]
            warm = [log.read_text().count("warmed up in") for log in logs]
            listed = [len(self.workers(machine)) for machine in (HERE, THERE)]
            return all(map(int.__ge__, warm, self.starts)) and listed == [2, 2]

        wait_until(serving, START_TIMEOUT, "two workers at both frontends")

    def kill(self, part: str, machine: int) -> None:
        worker = self.processes["worker", machine]
        self.starts[machine] += 1
        if part == "worker":
            known = self.workers().items()
            worker.kill()
            worker.wait()
            self.killed |= {i for i, one in known if self.addresses[machine] in one}
            self.start("worker", machine)
            return
        for child in psutil.Process(worker.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                if child.name() == part:
                    child.kill()

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(limit(30))
            except subprocess.TimeoutExpired:
                process.kill()
        for command in (f"link delete {self.link}", f"netns delete {self.namespace}"):
            with contextlib.suppress(subprocess.CalledProcessError):
                self.ip(command)


@pytest.fixture(scope="module")
def machines(
    request: pytest.FixtureRequest, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machines]:
    if request.param == "etcd" and not shutil.which("etcd"):
        pytest.skip("etcd is not installed")
    found = Machines(request.param, demo_model, tmp_path_factory.mktemp(request.param))
    try:
        try:
            found.connect()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespace: {error.stderr.decode()}")
        if request.param == "etcd":
            found.start("etcd", HERE)
        for part in ("worker", "frontend"):
            found.start(part, HERE)
            found.start(part, THERE)
        found.wait_until_serving()
        yield found
    finally:
        found.stop()


def body_of(number: int) -> dict[str, Any]:
    """Return one of 12 requests: greedy and seeded ones."""
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.2, "seed": 7}]
    prompt = f"What is a KV cache? {number % 12}"
    return {"prompt": prompt, "max_tokens": 100, "ignore_eos": True, **kinds[number % 2]}


def under_load(machines: Machines, harm: Callable[[], object] = lambda: None) -> list[str]:
    """Return the texts of streams from both frontends, harmed once half of them have begun."""
    bodies = [{**body_of(i), "max_tokens": 300} for i in range(12)]
    return asyncio.run(texts([(machines.url(i % 2), one) for i, one in enumerate(bodies)], harm))


# A scope makes tests share the machines of one kind.
@pytest.mark.parametrize("machines", ["etcd"], indirect=True, scope="module")
@pytest.mark.parametrize("harmed", ["worker", "tritonserver", "link"])
def test_streams_of_both_frontends_survive(machines: Machines, harmed: str) -> None:
    streams_survive(machines, harmed)


def streams_survive(machines: Machines, harmed: str) -> None:
    def harm() -> None:
        if harmed != "link":
            machines.kill(harmed, THERE)
            return
        machines.ip(f"-n {machines.namespace} link set eth0 down")
        time.sleep(3)
        machines.ip(f"-n {machines.namespace} link set eth0 up")

    machines.wait_until_serving()
    machines.uninterrupted = machines.uninterrupted or under_load(machines)
    assert under_load(machines, harm) == machines.uninterrupted


async def load(machines: Machines, kills: list[str]) -> list[str | BaseException]:
    """Return the answers of many streams, while a part is killed again and again."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> str:
        async with slots:
            asked = streamed(machines.url(number % 2), body_of(number), asyncio.Event())
            return await asyncio.wait_for(asked, SECONDS)

    async def kill() -> None:
        for turn in itertools.count():
            await asyncio.sleep(KILL_SECONDS)
            # The last worker is not killed: that all would fail then is another test.
            await asyncio.to_thread(machines.wait_until_serving)
            part, machine = ("worker", "tritonserver")[turn % 2], (turn + turn // 2) % 2
            kills.append(part)
            machines.kill(part, machine)

    killing = asyncio.create_task(kill())
    try:
        return await asyncio.gather(*map(one, range(LOAD)), return_exceptions=True)
    finally:
        assert not killing.done(), killing.exception()
        killing.cancel()


@pytest.mark.parametrize("machines", ["etcd"], indirect=True, scope="module")
def test_many_streams_under_kills(machines: Machines) -> None:
    """No stream hangs, breaks or is wrong; a new request may meet the death of its worker."""
    uninterrupted = texts([(machines.url(HERE), body_of(i)) for i in range(12)], lambda: None)
    expected, kills = asyncio.run(uninterrupted), list[str]()
    answers = asyncio.run(load(machines, kills))
    others = [one for i, one in enumerate(answers) if one != expected[i % 12]]
    refused = [one for one in others if isinstance(one, Failed) and one.args == (500,)]
    print(f"kills: {kills}, others: {others}")
    assert len(others) == len(refused) <= len(kills) * AT_ONCE // 4
    assert kills


@pytest.mark.parametrize("machines", ["file"], indirect=True, scope="module")
def test_streams_survive_with_a_shared_directory(machines: Machines) -> None:
    streams_survive(machines, "worker")
