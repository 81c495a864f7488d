"""Runs the steps of a build: fetch the model, convert or quantize it, build the engine, pack it."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

import yaml

import cog_triton
from cog_triton.errors import CogTritonError, ConfigurationError, EngineBuildError
from tools.engine_builder import disk, package, process
from tools.engine_builder.commands import Layout, Step, steps
from tools.engine_builder.config import EngineConfig
from tools.engine_builder.plan import check_code, dropped, layout_of, masked
from tools.engine_builder.redaction import Redactor, secrets_in
from tools.engine_builder.scripts import (
    candidates_of,
    existing,
    find_family,
    needs_examples,
    needs_family,
)
from tools.engine_builder.tools import Tools, check_version, gpus, tensorrt_llm_version
from tools.engine_builder.workdir import (
    check_output,
    linked,
    local_directory,
    logged,
    working_directory,
)

TAIL_LINES = 15

Emit = Callable[[str], None]


@dataclass(frozen=True)
class BuildResult:
    """A finished build.

    Attributes:
        output: the tar.
        seconds: of each step, in order.
    """

    output: Path
    seconds: Mapping[str, float]


def build(
    config: EngineConfig,
    output: Path,
    *,
    tools: Tools,
    workdir: Path | None = None,
    hf_token: str | None = None,
    notes: Iterable[str] = (),
    emit: Emit = print,
) -> BuildResult:
    """Builds an engine and writes it to ``output``, a tar; see ``package`` for what is in it.

    Args:
        output: is complete or, after an error, what it was before.
        workdir: where the model, the checkpoint and the engine are made. It is made, or was made by
            an earlier build, and is kept. When None it is a directory beside ``output``, which is
            removed after a build that succeeds.
        hf_token: Hugging Face token; the configuration's when None. It is in the steps' environment
            as HF_TOKEN, and nowhere else.
        notes: what the log begins with.
        emit: called with every line of progress, as it comes. No line has a secret.

    Raises:
        ConfigurationError: something is missing or does not fit, found before the long steps.
        EngineBuildError: a step failed, with its last lines.
    """
    output = output.absolute()
    environ = dict(os.environ)
    token = hf_token or (config.hf_token and config.hf_token.get_secret_value())
    if token:
        environ["HF_TOKEN"] = token
    hide = Redactor([environ.get("HF_TOKEN"), *secrets_in(config.plain())])
    directory = output.with_suffix(".build") if workdir is None else workdir.absolute()
    try:
        check_output(output)
        tools.check(scripts=needs_examples(config))
        with working_directory(directory) as log, logged(log, hide):
            result = _Build(config, output, tools, directory, environ, hide, emit, log).run(notes)
    except CogTritonError as error:
        raise type(error)(hide(error.message)) from None
    except OSError as error:
        raise EngineBuildError(hide(_of_disk(error))) from None
    if workdir is None:
        shutil.rmtree(directory, ignore_errors=True)
    return result


class _Build:
    """One run."""

    def __init__(
        self,
        config: EngineConfig,
        output: Path,
        tools: Tools,
        workdir: Path,
        environ: Mapping[str, str],
        hide: Redactor,
        emit: Emit,
        log: TextIO,
    ) -> None:
        self._config = config
        self._output = output
        self._tools = tools
        self._workdir = workdir
        self._environ = {**environ, "PYTHONUNBUFFERED": "1"}  # lines come when they are made
        self._hide = hide
        self._emit = emit
        self._log = log
        self._seconds: dict[str, float] = {}

    def run(self, notes: Iterable[str]) -> BuildResult:
        version = tensorrt_llm_version(self._tools.python)
        check_version(version)
        for note in (*notes, *dropped(self._config, version)):
            self._say(f"note: {note}")
        with self._timed("fetch"):
            model, tokenizer = self._fetch()
        check_code(self._config, model)
        tokenizer_files = package.tokenizer_files(tokenizer)
        layout = self._find_scripts(model)
        todo = steps(self._config, self._tools, layout, version)
        disk.check_space(self._workdir, self._output.parent, disk.bytes_needed(self._config, model))
        for step in todo:
            self._run(step)
        self._check_engine(layout)
        with self._timed("package"):
            self._pack(todo, layout.engine, tokenizer_files, version)
        total = sum(self._seconds.values())
        self._say(f"{self._output} is ready: {_size(self._output)} in {total:.0f} s")
        return BuildResult(self._output, self._seconds)

    def _fetch(self) -> tuple[Path, Path]:
        """The directories of the model and of the tokenizer."""
        config = self._config
        tokenizer = self._fetch_one(config.tokenizer, None) if config.tokenizer else None
        if tokenizer is not None and config.checkpoint is not None:
            return tokenizer, tokenizer  # nothing reads the model
        model = self._fetch_one(config.model, config.checksum)
        return model, tokenizer or model

    def _fetch_one(self, source: str, checksum: str | None) -> Path:
        from cog_triton import weights

        token = self._environ.get("HF_TOKEN")
        self._say(f"fetching {source}")
        fetched = weights.fetch(
            source, cache=self._workdir / "weights", checksum=checksum, token=token
        ).absolute()
        if local_directory(source):
            return fetched
        # Under its own name, which some conversion scripts look at.
        link = linked(source, self._workdir)
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(fetched, target_is_directory=True)
        return link

    def _find_scripts(self, model: Path) -> Layout:
        config = self._config
        if config.checkpoint is not None and not (config.checkpoint / "config.json").is_file():
            raise ConfigurationError(f"checkpoint: {config.checkpoint} has no config.json")
        family = find_family(config, model) if needs_family(config) else None
        candidates = candidates_of(config, self._tools, family)
        script = existing(candidates)
        if script is None and candidates:
            raise ConfigurationError(
                f"none of {', '.join(map(str, candidates))} is there: set TENSORRT_LLM_EXAMPLES to "
                "the examples directory of TensorRT-LLM's repository, at the version installed"
            )
        return layout_of(config, self._workdir, model, family, script)

    def _run(self, step: Step) -> None:
        self._say(f"[{step.name}] {shlex.join(masked(step.command, self._hide))}")
        tail: deque[str] = deque(maxlen=TAIL_LINES)

        def on_line(line: str) -> None:
            line = self._hide(line)
            tail.append(line)
            self._say(f"[{step.name}] {line}")

        start = time.monotonic()
        with self._timed(step.name):
            try:
                status = process.run(
                    step.command,
                    on_line,
                    cwd=self._workdir,
                    environ=self._environ,
                    timeout=self._config.timeout,
                )
                problem = _status_problem(status)
            except process.Expired:
                problem = f"was stopped at its time limit of {self._config.timeout:g} s"
            if problem is None and not (step.output / "config.json").is_file():
                problem = f"exited with status 0, but wrote no {step.output.name}/config.json"
            if problem is not None:
                self._fail(step, problem, time.monotonic() - start, tail)

    def _fail(self, step: Step, problem: str, seconds: float, tail: deque[str]) -> None:
        lines = "".join(f"\n  {line}" for line in tail) or " (it printed nothing)"
        raise EngineBuildError(
            f"step {step.name} {problem}, after {seconds:.0f} s; all of its output is in "
            f"{self._workdir / package.LOG}. Its last lines:{lines}"
        )

    def _check_engine(self, layout: Layout) -> None:
        """A build that lost a rank may still have exited with status 0."""
        ranks = _world_size(layout.checkpoint) or self._config.world_size
        files = [layout.engine / f"rank{rank}.engine" for rank in range(ranks)]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise EngineBuildError(
                f"step build wrote no {', '.join(missing)} to {layout.engine}; all of its output is "
                f"in {self._workdir / package.LOG}"
            )

    def _pack(
        self,
        todo: list[Step],
        engine: Path,
        tokenizer_files: list[package.Member],
        version: str | None,
    ) -> None:
        record = self._workdir / package.RECORD
        record.write_text(
            yaml.safe_dump(self._record(todo, engine, version), sort_keys=False), encoding="utf-8"
        )
        self._log.flush()
        members = [
            (package.RECORD, record),
            (package.LOG, self._workdir / package.LOG),
            *package.engine_files(engine),
            *tokenizer_files,
        ]
        package.write_tar(self._output, members)

    def _record(self, todo: list[Step], engine: Path, version: str | None) -> dict[str, Any]:
        commands = {step.name: masked(step.command, self._hide) for step in todo}
        return {
            "config": self._hide.clean(self._config.plain()),
            "versions": {
                "cog_triton": cog_triton.__version__,
                "tensorrt_llm": version or _engine_version(engine),
                "python": platform.python_version(),
            },
            "gpus": gpus(),
            "built": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "steps": [
                {
                    "name": name,
                    "seconds": round(seconds, 1),
                    **({"command": shlex.join(commands[name])} if name in commands else {}),
                }
                for name, seconds in self._seconds.items()
            ],
        }

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._seconds[name] = time.monotonic() - start
        self._say(f"[{name}] done in {self._seconds[name]:.1f} s")

    def _say(self, line: str) -> None:
        line = self._hide(line)
        print(line, file=self._log, flush=True)
        self._emit(line)


# Directories


# Checks and messages


def _status_problem(status: int) -> str | None:
    if status == 0:
        return None
    if status > 128:
        with contextlib.suppress(ValueError):
            name = signal.Signals(status - 128).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return f"was ended by {name}{hint}"
    return f"failed with exit status {status}"


def _world_size(checkpoint: Path) -> int | None:
    """The ranks that a checkpoint says it is for."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        return int(config["mapping"]["world_size"])
    return None


def _engine_version(engine: Path) -> str | None:
    """The version that an engine says it is of."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        version = json.loads((engine / "config.json").read_text(encoding="utf-8")).get("version")
        return None if version is None else str(version)
    return None


def _size(path: Path) -> str:
    size = path.stat().st_size
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _of_disk(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"
