"""The steps of a build: fetch the model, convert or quantize it, build the engine, pack all into one tar.

::

    build.yaml      the configuration, versions and times
    build.log       the steps' output
    engine/         rank0.engine …, config.json              ENGINE_DIR
    tokenizer/      tokenizer.json, tokenizer_config.json …  TOKENIZER

The tokenizer has a directory of its own because both have a config.json: the engine's, and the model's,
without which transformers does not know some tokenizers' class.
"""

import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

import yaml

import cog_triton
from cog_triton.errors import CogTritonError, ConfigurationError, EngineBuildError, file_problem
from cog_triton.processes import locked
from cog_triton.redaction import shown_words, without_secrets
from cog_triton.server.command import guarded
from cog_triton.weights.cache import fetch
from tools.command_line import begin
from tools.engine_builder.command import Options
from tools.engine_builder.config import EngineConfig, load_config
from tools.engine_builder.toolchain import (
    Step,
    Toolchain,
    find_toolchain,
    model_directory,
    plan,
    read_json,
    require,
)

MARKER = ".cog-triton-engine-build"
RECORD, LOG = "build.yaml", "build.log"
TAIL_LINES = 15
STOP_TIMEOUT = 10.0  # seconds from SIGTERM to SIGKILL
TOKENIZER_FILES: dict[str, list[str]] = yaml.safe_load(
    Path(__file__).with_name("tokenizer_files.yaml").read_text(encoding="utf-8")
)
Member = tuple[str, Path]  # a name in the tar, and the file


def main(options: Options) -> int:
    """Build, or with ``dry_run`` print the commands; return 1 when a step failed."""
    begin()
    config, toolchain = load_config(options.config), find_toolchain()
    if options.dry_run:
        directory = options.workdir or options.output.with_suffix(".build")
        for step in plan(config, toolchain, directory):
            print(f"# {step.name}\n{shlex.join(step.command)}")
        return 0
    try:
        build(config, options.output, toolchain=toolchain, workdir=options.workdir)
        return 0
    except EngineBuildError as error:
        print(error, file=sys.stderr)
        return 1


def build(
    config: EngineConfig,
    output: Path,
    *,
    toolchain: Toolchain,
    workdir: Path | None = None,
    hf_token: str | None = None,
) -> None:
    """Build an engine and write it to ``output``, a tar; complete or, after an error, as it was.

    Args:
        workdir: for the model, the checkpoint and the engine. It is made, or was made by an earlier
            build, and is kept. None is a directory beside ``output``, removed after success.
        hf_token: Hugging Face token, HF_TOKEN when None; no line that is printed or stored has it.

    Raises:
        ConfigurationError: something is missing or does not fit, found before the long steps.
        EngineBuildError: a step failed, with its last lines.
    """
    output = output.absolute()
    token = hf_token or os.environ.get("HF_TOKEN")
    directory = output.with_suffix(".build") if workdir is None else workdir.absolute()
    if output.suffix != ".tar":
        raise ConfigurationError(f"{output.name}: the output is a tar, and must end in .tar")
    toolchain.check(config)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with _working_directory(directory) as log:
            try:
                _Build(config, output, toolchain, directory, token, log).run()
            except CogTritonError as error:
                print(error, file=log)
                raise
    except OSError as error:
        raise EngineBuildError(file_problem(error)) from None
    if workdir is None:
        shutil.rmtree(directory, ignore_errors=True)


@dataclass
class _Build:
    config: EngineConfig
    output: Path
    toolchain: Toolchain
    workdir: Path
    token: str | None
    log: TextIO
    done: list[dict[str, Any]] = field(default_factory=list)  # steps, for the record

    def run(self) -> None:
        config, checkpoint = self.config, self.config.checkpoint
        with self._timed("fetch"):
            source = config.tokenizer or config.model
            tokenizer = self._fetch(source, None if config.tokenizer else config.checksum)
            model = tokenizer  # which nothing reads if there is a checkpoint
            if config.tokenizer and checkpoint is None:
                model = self._fetch(config.model, config.checksum)
        tokenizer_members = tokenizer_files(tokenizer)
        if checkpoint is not None and not (checkpoint / "config.json").is_file():
            raise ConfigurationError(f"checkpoint: {checkpoint} has no config.json")
        steps = plan(config, self.toolchain, self.workdir)
        if checkpoint is None:
            require(Path(steps[0].command[1]))
        _check_space(config, checkpoint or model, self.workdir)
        for step in steps:
            self._run(step)
        with self._timed("package"):
            self._pack(steps[-1].output, tokenizer_members)
        size = self.output.stat().st_size / 1e9
        self._say(f"{self.output} is ready: {size:.3g} GB")

    def _fetch(self, source: str, checksum: str | None) -> Path:
        self._say(f"fetching {without_secrets(source)}")
        cache = self.workdir / "weights"
        fetched = fetch(source, cache=cache, checksum=checksum, token=self.token)
        path = model_directory(source, self.workdir)
        if path != fetched.absolute():
            # Under its own name, which some conversion scripts look at.
            path.parent.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)
            path.symlink_to(fetched.absolute(), target_is_directory=True)
        return path

    def _run(self, step: Step) -> None:
        command = shlex.join(shown_words(step.command))
        self._say(f"[{step.name}] {command}")
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        environ = {**os.environ, "PYTHONUNBUFFERED": "1"}  # lines come when they are made
        if self.token:
            environ["HF_TOKEN"] = self.token
        with self._timed(step.name, command=command):
            with subprocess.Popen(
                # The guard stops the command and all that it started when this process ends or is killed.
                guarded("server", "", STOP_TIMEOUT, [*step.command]),
                cwd=self.workdir,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,  # Ctrl-C reaches only this process
            ) as process:
                assert process.stdin is not None
                assert process.stdout is not None
                try:
                    for line in process.stdout:
                        tail.append(self._say(f"[{step.name}] {line.rstrip()}"))
                    process.wait()
                finally:
                    process.stdin.close()  # tells the guard to stop what still runs
                    process.wait()
            if problem := _status_problem(process.returncode) or self._missing_output(step):
                lines = "".join(f"\n  {line}" for line in tail)
                raise EngineBuildError(
                    f"step {step.name} {problem}; all of its output is in {self.workdir / LOG}. "
                    f"Its last lines:{lines}"
                )

    def _missing_output(self, step: Step) -> str:
        """Name the first file that a step with status 0 should have written: it may have lost a rank."""
        names = ["config.json"]
        if step.name == "build":
            checkpoint = self.config.checkpoint or self.workdir / "checkpoint"
            mapping = read_json(checkpoint / "config.json").get("mapping", {})
            ranks = mapping.get("world_size", self.config.tp_size * self.config.pp_size)
            names += [f"rank{rank}.engine" for rank in range(ranks)]
        missing = [name for name in names if not (step.output / name).is_file()]
        return f"exited with status 0, but wrote no {step.output / missing[0]}" if missing else ""

    def _pack(self, engine: Path, tokenizer: list[Member]) -> None:
        config = self.config.model_dump(mode="json", exclude_defaults=True)
        sources = {"model", "tokenizer"} & config.keys()
        record = {
            "config": {**config, **{name: without_secrets(config[name]) for name in sources}},
            "versions": {
                "cog_triton": cog_triton.__version__,
                "tensorrt_llm": read_json(engine / "config.json").get("version"),
                "python": platform.python_version(),
            },
            "built": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "steps": self.done,
        }
        text = yaml.safe_dump(record, sort_keys=False)
        (self.workdir / RECORD).write_text(text, encoding="utf-8")
        self.log.flush()
        engine_files = (file for file in sorted(engine.rglob("*")) if file.is_file())
        members = [(name, self.workdir / name) for name in (RECORD, LOG)]
        members += [(f"engine/{file.relative_to(engine)}", file) for file in engine_files]
        write_tar(self.output, [*members, *tokenizer])

    @contextmanager
    def _timed(self, name: str, **more: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        seconds = round(time.monotonic() - start, 1)
        self.done.append({"name": name, "seconds": seconds, **more})
        self._say(f"[{name}] done in {seconds} s")

    def _say(self, line: str) -> str:
        if self.token:
            line = line.replace(self.token, "***")
        print(line, file=self.log, flush=True)
        print(line, flush=True)
        return line


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


def _check_space(config: EngineConfig, model: Path, workdir: Path) -> None:
    """Fail now instead of in an hour: the working directory gets a checkpoint and an engine."""
    for pattern in ("*.safetensors", "*.bin", "*.pt", "*.pth"):
        if files := list(model.glob(pattern)):
            break  # one copy of the weights
    needed = sum(file.stat().st_size for file in files) * (1 if config.quantized else 2)
    free = shutil.disk_usage(workdir).free
    if free < needed:
        raise ConfigurationError(
            f"not enough space in {workdir}: the build needs about {needed / 1e9:.1f} GB, "
            f"{free / 1e9:.1f} GB are free"
        )


def _status_problem(status: int) -> str | None:
    if status in {128 + number for number in signal.valid_signals()}:
        name = signal.Signals(status - 128).name
        return f"was ended by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"
    return f"failed with exit status {status}" if status else None


def tokenizer_files(directory: Path) -> list[Member]:
    """Return a model's files that its tokenizer is made of, or raise ConfigurationError: there are none."""
    vocabularies = TOKENIZER_FILES["vocabularies"]
    if not any(file for pattern in vocabularies for file in directory.glob(pattern)):
        raise ConfigurationError(
            f"{directory} has no tokenizer (none of {', '.join(vocabularies)}): name one with "
            "tokenizer in the build configuration"
        )
    patterns = [*vocabularies, *TOKENIZER_FILES["others"]]
    files = {file for pattern in patterns for file in directory.glob(pattern)}
    return [(f"tokenizer/{file.relative_to(directory)}", file) for file in sorted(files)]


def write_tar(output: Path, members: Iterable[Member]) -> None:
    """Write the tar; ``output`` is complete, or what it was."""
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        # The target of a symbolic link is packed: Hugging Face's cache is made of links.
        with tarfile.open(temporary, "w", dereference=True) as tar:
            for name, path in members:
                tar.add(path, name, recursive=False, filter=_anonymous)
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out the builder's account, which means nothing on another machine."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o644
    return member
