"""The steps of a build: fetch the model, convert or quantize it, build the engine, pack it."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TextIO

import yaml

import cog_triton
from cog_triton.errors import CogTritonError, ConfigurationError, EngineBuildError
from cog_triton.processes import locked
from cog_triton.server.command import guarded
from tools.engine_builder import package
from tools.engine_builder.config import EngineConfig
from tools.engine_builder.toolchain import (
    Step,
    Toolchain,
    gpus,
    linked,
    local_directory,
    plan,
)

MARKER = ".cog-triton-engine-build"
RECORD, LOG = "build.yaml", "build.log"
TAIL_LINES = 15
SHORTEST = 6  # of a secret: anything shorter would blank out ordinary text
STOP_TIMEOUT = 10.0  # seconds from SIGTERM to SIGKILL
SHARE = {
    "none": 1.0,
    **dict.fromkeys(("fp8", "fp8_pc_pt", "int8_sq", "int8_wo"), 0.6),
    **dict.fromkeys(("int4_awq", "w4a8_awq", "int4_wo", "nvfp4"), 0.4),
}
"""Size of a checkpoint relative to the model's; the embeddings stay as they are."""
_HF_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_URL_USER = re.compile(r"(?<![\w+.-])([A-Za-z][\w+.-]*://)[^/\s@'\"]*@")
_URL_QUERY = re.compile(r"(?<![\w+.-])([A-Za-z][\w+.-]*://[^\s?#'\"<>]*)\?[^\s#'\"<>]*")

Emit = Callable[[str], None]


def redact(text: str, token: str | None = None) -> str:
    """Mask Hugging Face tokens, and user, password and query of URLs."""
    if token and len(token) >= SHORTEST:
        text = text.replace(token, "***")
    text = _URL_USER.sub(r"\1***@", _HF_TOKEN.sub("***", text))
    return _URL_QUERY.sub(r"\1?***", text)


@dataclass(frozen=True)
class BuildResult:
    """A finished build: the tar, and the seconds of each step, in order."""

    output: Path
    seconds: Mapping[str, float]


def build(
    config: EngineConfig,
    output: Path,
    *,
    toolchain: Toolchain,
    workdir: Path | None = None,
    hf_token: str | None = None,
    emit: Emit = print,
) -> BuildResult:
    """Build an engine and write it to ``output``, a tar; complete or, after an error, as it was.

    Args:
        workdir: for the model, the checkpoint and the engine. It is made, or was made by an earlier
            build, and is kept. None is a directory beside ``output``, removed after success.
        hf_token: Hugging Face token; the configuration's when None. It is in the steps' environment
            as HF_TOKEN, and nowhere else.
        emit: called with every line of progress, as it comes. No line has a secret.

    Raises:
        ConfigurationError: something is missing or does not fit, found before the long steps.
        EngineBuildError: a step failed, with its last lines.
    """
    output = output.absolute()
    token = hf_token or (config.hf_token and config.hf_token.get_secret_value())
    token = token or os.environ.get("HF_TOKEN")
    directory = output.with_suffix(".build") if workdir is None else workdir.absolute()
    try:
        _check_output(output)
        toolchain.check(config)
        with _working_directory(directory) as log:
            try:
                result = _Build(config, output, toolchain, directory, token, emit, log).run()
            except CogTritonError as error:
                print(redact(str(error), token), file=log)
                raise
    except CogTritonError as error:
        raise type(error)(redact(error.message, token)) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise EngineBuildError(f"{where}{error.strerror or error}") from None
    if workdir is None:
        shutil.rmtree(directory, ignore_errors=True)
    return result


@dataclass
class _Build:
    config: EngineConfig
    output: Path
    toolchain: Toolchain
    workdir: Path
    token: str | None
    emit: Emit
    log: TextIO

    def run(self) -> BuildResult:
        self.seconds: dict[str, float] = {}
        version = self.toolchain.version()
        with self._timed("fetch"):
            model, tokenizer = self._fetch()
        tokenizer_members = package.tokenizer_files(tokenizer)
        checkpoint = self.config.checkpoint
        if checkpoint is not None and not (checkpoint / "config.json").is_file():
            raise ConfigurationError(f"checkpoint: {checkpoint} has no config.json")
        fetched = self.config.model_copy(update={"model": str(model)})
        planned = plan(fetched, self.toolchain, self.workdir, version)
        for note in planned.notes:
            self._say(f"note: {note}")
        if planned.scripts and not any(path.is_file() for path in planned.scripts):
            places = ", ".join(map(str, planned.scripts))
            raise ConfigurationError(
                f"none of {places} is there: set TENSORRT_LLM_EXAMPLES to the examples directory "
                "of TensorRT-LLM's repository, at the version installed"
            )
        _check_space(self.workdir, self.output.parent, _bytes_needed(self.config, model))
        for step in planned.steps:
            self._run(step)
        engine = planned.steps[-1].output
        self._check_ranks(checkpoint or self.workdir / "checkpoint", engine)
        with self._timed("package"):
            self._pack(planned.steps, engine, tokenizer_members, version)
        size = self.output.stat().st_size / 1e6
        shown = f"{size / 1e3:.1f} GB" if size >= 1e3 else f"{size:.1f} MB"
        self._say(f"{self.output} is ready: {shown} in {sum(self.seconds.values()):.0f} s")
        return BuildResult(self.output, self.seconds)

    def _fetch(self) -> tuple[Path, Path]:
        """Return the directories of the model and of the tokenizer."""
        config = self.config
        if config.tokenizer is None:
            model = self._fetch_one(config.model, config.checksum)
            return model, model
        tokenizer = self._fetch_one(config.tokenizer, None)
        if config.checkpoint is not None:
            return tokenizer, tokenizer  # nothing reads the model
        return self._fetch_one(config.model, config.checksum), tokenizer

    def _fetch_one(self, source: str, checksum: str | None) -> Path:
        from cog_triton import weights

        self._say(f"fetching {source}")
        cache = self.workdir / "weights"
        fetched = weights.fetch(source, cache=cache, checksum=checksum, token=self.token)
        if local_directory(source):
            return fetched.absolute()
        # Under its own name, which some conversion scripts look at.
        link = linked(source, self.workdir)
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(fetched.absolute(), target_is_directory=True)
        return link

    def _run(self, step: Step) -> None:
        self._say(f"[{step.name}] {shlex.join(step.command)}")
        tail: deque[str] = deque(maxlen=TAIL_LINES)

        def on_line(line: str) -> None:
            tail.append(redact(line, self.token))
            self._say(f"[{step.name}] {line}")

        environ = {**os.environ, "PYTHONUNBUFFERED": "1"}  # lines come when they are made
        if self.token:
            environ["HF_TOKEN"] = self.token
        with self._timed(step.name):
            start, timeout = time.monotonic(), self.config.timeout
            status = run_guarded(step.command, on_line, self.workdir, environ, timeout)
            problem: str | None
            if status is None:
                problem = f"was stopped at its time limit of {timeout:g} s"
            elif problem := _status_problem(status):
                pass
            elif not (step.output / "config.json").is_file():
                problem = f"exited with status 0, but wrote no {step.output.name}/config.json"
            if problem:
                lines = "".join(f"\n  {line}" for line in tail) or " (it printed nothing)"
                raise EngineBuildError(
                    f"step {step.name} {problem}, after {time.monotonic() - start:.0f} s; all of "
                    f"its output is in {self.workdir / LOG}. Its last lines:{lines}"
                )

    def _check_ranks(self, checkpoint: Path, engine: Path) -> None:
        """Fail if a rank's file is missing: a build that lost one may have exited with status 0."""
        ranks = self.config.world_size
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
            ranks = int(config["mapping"]["world_size"])
        files = [engine / f"rank{rank}.engine" for rank in range(ranks)]
        if missing := ", ".join(file.name for file in files if not file.is_file()):
            raise EngineBuildError(
                f"step build wrote no {missing} to {engine}; all of its output is in "
                f"{self.workdir / LOG}"
            )

    def _pack(
        self, done: list[Step], engine: Path, tokenizer: list[package.Member], version: str | None
    ) -> None:
        commands = {step.name: {"command": shlex.join(step.command)} for step in done}
        if version is None:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                built = json.loads((engine / "config.json").read_text(encoding="utf-8"))
                version = built.get("version")
        record = {
            "config": self.config.plain(),
            "versions": {
                "cog_triton": cog_triton.__version__,
                "tensorrt_llm": version,
                "python": platform.python_version(),
            },
            "gpus": gpus(),
            "built": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "steps": [
                {"name": name, "seconds": round(seconds, 1), **commands.get(name, {})}
                for name, seconds in self.seconds.items()
            ],
        }
        # Wide lines: a URL that is folded would not be recognized.
        text = yaml.safe_dump(record, sort_keys=False, width=1_000_000)
        (self.workdir / RECORD).write_text(redact(text, self.token), encoding="utf-8")
        self.log.flush()
        engine_files = (file for file in sorted(engine.rglob("*")) if file.is_file())
        members = [(name, self.workdir / name) for name in (RECORD, LOG)]
        members += [(f"engine/{file.relative_to(engine)}", file) for file in engine_files]
        package.write_tar(self.output, [*members, *tokenizer])

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - start
        self._say(f"[{name}] done in {self.seconds[name]:.1f} s")

    def _say(self, line: str) -> None:
        line = redact(line, self.token)
        print(line, file=self.log, flush=True)
        self.emit(line)


def run_guarded(
    command: Sequence[str],
    on_line: Callable[[str], None],
    cwd: Path,
    environ: Mapping[str, str],
    timeout: float | None = None,
) -> int | None:
    """Run a command; return its exit status, None if it was stopped at its time limit.

    It ends with the call, and so do all processes that it started, whatever ends the call: the guard of
    tritonserver sees to it, even when this process is killed. A status above 128 is 128 plus the number
    of the signal that ended it.

    Args:
        on_line: called with each line of standard output and standard error. A progress bar that is
            drawn over itself comes as one line a step.
        timeout: seconds; None is no limit.
    """
    process = subprocess.Popen(
        guarded("server", "", STOP_TIMEOUT, [*command]),
        cwd=cwd,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches this process alone, which stops the command
    )
    assert process.stdin is not None
    assert process.stdout is not None
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        process.stdin.close()  # type: ignore[union-attr]

    limit = threading.Timer(timeout, expire) if timeout else None
    try:
        if limit:
            limit.start()
        for line in process.stdout:
            on_line(line.rstrip("\n"))
        process.wait()
    finally:
        if limit:
            limit.cancel()
        process.stdin.close()  # the guard stops what still runs
        process.wait()
        process.stdout.close()
    return None if expired.is_set() else process.returncode


@contextmanager
def _working_directory(directory: Path) -> Iterator[TextIO]:
    """Hold an empty place for the steps' results, for this build only; yield its log."""
    if directory.is_dir() and any(directory.iterdir()) and not (directory / MARKER).is_file():
        raise ConfigurationError(
            f"{directory} is not empty, and not of an earlier build: name another --workdir"
        )
    directory.mkdir(parents=True, exist_ok=True)

    def refuse() -> None:
        raise ConfigurationError(f"another build is running in {directory}")

    with locked(directory, waiting=refuse):
        (directory / MARKER).touch()
        for name in ("checkpoint", "engine"):
            # An earlier build with more ranks left more of them.
            shutil.rmtree(directory / name, ignore_errors=True)
        with (directory / LOG).open("w", encoding="utf-8") as log:
            yield log


def _check_output(output: Path) -> None:
    if output.suffix != ".tar":
        raise ConfigurationError(f"{output.name}: the output is a tar, and must end in .tar")
    if output.is_dir():
        raise ConfigurationError(f"{output} is a directory")
    output.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(output.parent, os.W_OK):
        raise ConfigurationError(f"{output.parent} cannot be written to")


def _bytes_needed(config: EngineConfig, model: Path) -> int:
    """Return the bytes of the checkpoint, roughly; engine and tar are as large."""
    share = 1.0 if config.checkpoint else SHARE[config.quantization]
    for pattern in ("*.safetensors", "*.bin", "*.pt", "*.pth"):
        files = list((config.checkpoint or model).glob(pattern))
        if files:  # of one copy of the weights
            return int(sum(file.stat().st_size for file in files) * share)
    return 0


def _check_space(workdir: Path, target: Path, needed: int) -> None:
    """Fail now instead of in an hour: workdir gets two times ``needed`` bytes, target one."""
    demands: dict[int, tuple[Path, int]] = {}
    for directory, share in ((workdir, 2 * needed), (target, needed)):
        device = directory.stat().st_dev
        path, already = demands.get(device, (directory, 0))
        demands[device] = (path, already + share)
    for path, demand in demands.values():
        free = shutil.disk_usage(path).free
        if free < demand:
            raise ConfigurationError(
                f"not enough space in {path}: the build needs about {demand / 1e9:.1f} GB, "
                f"{free / 1e9:.1f} GB are free"
            )


def _status_problem(status: int) -> str | None:
    if status > 128:
        with contextlib.suppress(ValueError):
            name = signal.Signals(status - 128).name
            return f"was ended by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"
    return f"failed with exit status {status}" if status else None
