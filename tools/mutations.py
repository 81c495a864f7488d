"""Break random places of cog_triton, one at a time, and see which the tests catch.

python -m tools.mutations --count 20 --seed 46 --integration

Conditions are inverted, comparisons changed, and awaits dropped, in a copy of the last commit, whose tests
should pass. The unit tests of the changed file's package run first, with those of tests/compute where they
test it, and with --integration the tests of servers that use it. The first test that fails is printed. A
change that no test notices is printed as "survived", and the exit status is 1 if more than a tenth survive.
"""

import argparse
import ast
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cog_triton"
ENOUGH = 0.9
SECONDS_OF_A_RUN = 480  # a test that waits for ever has noticed the change, too
CHANGED_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
# The packages that tests/compute tests.
COMPUTING_PACKAGES = ("adapters", "engines", "weights")
# Tests of servers by the package of the changed file.
INTEGRATION_TESTS = {
    "adapters": ["test_openai_lora.py"],
    "api": ["test_openai.py", "test_openai_store.py", "test_front.py", "test_cog_server.py"],
    "cli": ["test_terminal.py", "test_openai_attached.py"],
    "client": ["test_ensemble.py", "test_cancels.py", "test_faulty_connections.py"],
    "deployment": ["test_start_failures.py", "test_process.py", "test_recovery.py"],
    "engines": ["test_generation.py", "test_sampling.py", "test_simulated.py"],
    "models": ["test_ensemble.py", "test_bls.py", "test_tensorrtllm_text.py"],
    "repository": ["test_ensemble.py", "test_tensorrtllm_predictor.py"],
    "server": ["test_process.py", "test_recovery.py"],
    "web": ["test_limits.py"],
}
OTHER_INTEGRATION_TESTS = ["test_cog_server.py", "test_openai.py", "test_terminal.py"]


@dataclass(frozen=True)
class Mutation:
    """A part of a file, and the code in its place."""

    file: Path  # below the checkout
    line: int
    start: int  # in bytes
    end: int
    before: str
    after: str

    def apply(self, checkout: Path) -> None:
        source = (ROOT / self.file).read_bytes()
        changed = source[: self.start] + self.after.encode() + source[self.end :]
        (checkout / self.file).write_bytes(changed)

    def undo(self, checkout: Path) -> None:
        (checkout / self.file).write_bytes((ROOT / self.file).read_bytes())


def mutations(file: Path) -> Iterator[Mutation]:
    """Yield the changes that can be made to a Python file."""
    source = file.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def offsets(node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        return start, starts[node.end_lineno - 1] + node.end_col_offset

    def text(node: ast.expr) -> str:
        start, end = offsets(node)
        return source[start:end].decode()

    def mutation(node: ast.expr, after: str) -> Mutation:
        start, end = offsets(node)
        return Mutation(file.relative_to(ROOT), node.lineno, start, end, text(node), after)

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            if ast.unparse(node.test) != "TYPE_CHECKING":
                yield mutation(node.test, f"(not ({text(node.test)}))")
        elif isinstance(node, ast.Await):
            yield mutation(node, f"({text(node.value)})")
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            operator = CHANGED_COMPARISONS[type(node.ops[0])]
            yield mutation(node, f"(({text(node.left)}) {operator} ({text(node.comparators[0])}))")


def unit_tests(file: Path) -> Path:
    """Return the directory of the unit tests of a file's package, or of the nearest one above it."""
    directory = Path("tests/unit", *file.parent.parts[1:])
    while not (ROOT / directory).is_dir():
        directory = directory.parent
    return directory


def compute_tests(file: Path) -> list[Path]:
    """Return the tests that compute with PyTorch, if they test the file's package."""
    return [Path("tests/compute")] if file.parts[1] in COMPUTING_PACKAGES else []


def integration_tests(file: Path) -> list[Path]:
    names = INTEGRATION_TESTS.get(file.parts[1], OTHER_INTEGRATION_TESTS)
    return [Path("tests/integration", name) for name in names]


def failure(checkout: Path, tests: list[Path]) -> str | None:
    """Run tests in a copy of the checkout; return the first that fails, or None."""
    # In one process: a mutation may hang, and then nothing may be left of the run.
    options = ["-q", "-x", "-n", "0", "-m", "not rare"]
    command = [sys.executable, "-m", "pytest", *options, *map(str, tests)]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=checkout,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=SECONDS_OF_A_RUN,
        )
    except subprocess.TimeoutExpired:
        return "a test that did not end"
    if done.returncode == 0:
        return None
    for line in done.stdout.splitlines():
        # The line of a log may begin with ERROR, too.
        if line.startswith(("FAILED tests/", "ERROR tests/")):
            return line.split()[1]
    return f"pytest, which ended with {done.returncode}"


def catching_test(mutation: Mutation, checkout: Path, *, integration: bool) -> str | None:
    """Return the first test that fails with a change; None if it survives."""
    mutation.apply(checkout)
    try:
        quick = [unit_tests(mutation.file), *compute_tests(mutation.file)]
        caught_by = failure(checkout, quick)
        if caught_by is None and integration:
            caught_by = failure(checkout, integration_tests(mutation.file))
        return caught_by
    finally:
        mutation.undo(checkout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=20, help="how many changes (default: 20)")
    parser.add_argument("--seed", type=int, default=46, help="of the choice (default: 46)")
    parser.add_argument("--integration", action="store_true", help="run tests of servers, too")
    options = parser.parse_args()
    possible = [found for file in sorted(PACKAGE.rglob("*.py")) for found in mutations(file)]
    chosen = random.Random(options.seed).sample(possible, options.count)
    caught = 0
    with tempfile.TemporaryDirectory() as directory:
        checkout = Path(directory, "checkout")
        subprocess.run(
            ["git", "worktree", "add", "-q", "--detach", str(checkout)], cwd=ROOT, check=True
        )
        (checkout / ".venv").symlink_to(Path(sys.prefix))
        try:
            for mutation in chosen:
                test = catching_test(mutation, checkout, integration=options.integration)
                if test is not None:
                    caught += 1
                change = (
                    f"{mutation.file}:{mutation.line}: {mutation.before!r} -> {mutation.after!r}"
                )
                print(f"caught by {test}: {change}" if test else f"survived: {change}", flush=True)
        finally:
            subprocess.run(
                ["git", "worktree", "remove", "--force", str(checkout)], cwd=ROOT, check=True
            )
    print(f"{caught} of {len(chosen)} caught")
    return 0 if caught >= ENOUGH * len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
