"""Mutation testing: change one operator or constant of the source and see whether the tests notice.

    python -m benchmarks.mutation --area slicing --count 25
    python -m benchmarks.mutation --out build/mutation.json --jobs 16     # all areas; hours on two cores

Mutations are sampled with a seed, so two runs on the same source try the same ones. The tests of an area
run once without a mutation, to record their durations and the lines they execute; those that fail are left
out and listed. Each mutation then runs the tests that execute the changed line, in a copy of the repository,
the fastest first and until the first failure. If none executes the line, or if importing the module does,
all tests of the area run. A failure counts if the same tests pass without the mutation, in the same order.
Survivors are printed with file, line and change: either a test is missing, or the change makes no
observable difference.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from typing import TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 3600  # seconds the tests of an area may run without a mutation
SLACK = 120  # seconds beyond five times the tests' own time; a mutant that hangs longer counts as killed


@dataclass(frozen=True)
class Area:
    """Source files, and the tests that must notice a change in them."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]


SURFACE = ("tests/test_public_api.py",)  # names and signatures of all areas
AREAS = {
    "slicing": Area(
        ("src/dsnet/slicing/*.py",),
        ("tests/slicing", "tests/models/test_reference.py", "tests/test_extract.py", "tests/test_cost.py"),
    ),
    "norms": Area(
        ("src/dsnet/slicing/norm.py", "src/dsnet/training/bn_calibration.py", "src/dsnet/training/sync*.py"),
        ("tests/slicing", "tests/models/test_statistics.py", "tests/training/test_bn_calibration.py",
         "tests/core/distributed"),
    ),
    "gates": Area(
        ("src/dsnet/gate*.py", "src/dsnet/gate/*.py", "src/dsnet/models/group_by_route.py"),
        ("tests/test_gate.py", "tests/models/test_group_by_route.py", "tests/models/test_bad_input.py",
         "tests/models/test_statistics.py", "tests/test_extract.py", "tests/test_cost.py"),
    ),
    "routing": Area(
        ("src/dsnet/routing/*.py", "src/dsnet/calibration/*.py"), ("tests/routing", "tests/calibration")
    ),
    "runtime": Area(
        ("src/dsnet/runtime/**/*.py",), ("tests/runtime", "tests/detection/deploy/test_ragged_plan.py")
    ),
    "checkpoints": Area(
        ("src/dsnet/core/checkpoint*.py", "src/dsnet/core/files.py", "src/dsnet/models/loading.py"),
        ("tests/core", "tests/models/test_loading.py", "tests/training/test_run_dir.py"),
    ),
    "detection": Area(("src/dsnet/detection/**/*.py",), ("tests/detection",)),
}  # fmt: skip

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
OPERATIONS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "//"),
}


@dataclass(frozen=True)
class Mutation:
    """One change: characters ``start`` to ``stop`` of a file become ``new``."""

    file: str
    statement: int  # the line it starts in
    line: int
    start: int
    stop: int
    old: str
    new: str


class Finder(ast.NodeVisitor):
    """Collects the mutations of one file. Annotations, messages and docstrings are left alone."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.text = file, text
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.lines = text.splitlines()
        self.statement = 0
        self.mutations: list[Mutation] = []

    def offset(self, line: int, column: int) -> int:
        """Turn a position of `ast`, whose columns count bytes, into a character offset."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def add(self, line: int, start: int, stop: int, new: str) -> None:
        old = self.text[start:stop]
        self.mutations.append(Mutation(self.file, self.statement, line, start, stop, old, new))

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self.statement = node.lineno
        super().visit(node)

    def between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        """Replace the operator between two operands."""
        assert left.end_lineno is not None
        assert left.end_col_offset is not None
        start = self.offset(left.end_lineno, left.end_col_offset)
        stop = self.offset(right.lineno, right.col_offset)
        at = self.text.find(old, start, stop)
        if at >= 0:
            self.add(left.end_lineno, at, at + len(old), new)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for child in (*node.decorator_list, *node.args.defaults, *node.args.kw_defaults, *node.body):
            if child is not None:
                self.visit(child)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leave messages alone."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave assertions alone."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave texts alone."""

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, right, op in zip(operands, operands[1:], node.ops, strict=False):
            self.between(left, right, *COMPARISONS[type(op)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in OPERATIONS and not isinstance(node.right, ast.Constant | ast.JoinedStr):
            self.between(node.left, node.right, *OPERATIONS[type(node.op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        self.between(node.values[0], node.values[1], old, new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        start = self.offset(node.lineno, node.col_offset)
        if isinstance(node.op, ast.Not):
            self.add(node.lineno, start, start + 4, "")
        elif isinstance(node.op, ast.USub):
            self.add(node.lineno, start, start + 1, "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        start = self.offset(node.lineno, node.col_offset)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        stop = self.offset(node.end_lineno, node.end_col_offset)
        if isinstance(node.value, bool):
            self.add(node.lineno, start, stop, str(not node.value))
        elif type(node.value) is int:
            self.add(node.lineno, start, stop, str(node.value + 1))

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func
        if isinstance(name, ast.Name) and name.id in ("min", "max"):
            start = self.offset(name.lineno, name.col_offset)
            self.add(name.lineno, start, start + 3, "max" if name.id == "min" else "min")
        self.generic_visit(node)


def mutations_of(area: Area) -> list[Mutation]:
    """Return every mutation of an area's sources."""
    found = []
    for path in sorted({p for pattern in area.sources for p in ROOT.glob(pattern)}):
        text = path.read_text(encoding="utf-8")
        finder = Finder(path.relative_to(ROOT).as_posix(), text)
        finder.visit(ast.parse(text))
        found += finder.mutations
    return found


@dataclass(frozen=True)
class Record:
    """What `benchmarks.lines_per_test` recorded of an area's tests."""

    seconds: dict[str, float]
    failed: list[str]
    lines: dict[str, dict[str, list[str]]]

    def tests(self, mutation: Mutation) -> list[str]:
        """Return the tests that execute a mutation's statement, or all tests; the fastest first."""
        lines = self.lines.get(mutation.file, {})
        statement = range(mutation.statement, mutation.line + 1)
        tests = {test for line in statement for test in lines.get(str(line), ())}
        return sorted(tests or self.seconds, key=self.seconds.__getitem__)


class Repository:
    """A copy of the repository, in which one mutation at a time is tried."""

    def __init__(self, root: Path, python: str) -> None:
        self.root, self.python = root, python
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "runs", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, root, ignore=ignored)

    def pytest(self, timeout: float, *arguments: str) -> subprocess.CompletedProcess[str] | None:
        """Run pytest; None if it takes longer than ``timeout`` seconds."""
        command = [self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
        settings = {
            **os.environ,
            "PYTHONPATH": str(self.root / "src"),
            "OMP_NUM_THREADS": "1",
            "LINES_PER_TEST": str(self.root / "lines_per_test.json"),
            "COVERAGE_CORE": "ctrace",  # sys.monitoring sees only the first test that executes a line
        }
        try:
            return subprocess.run(
                command,
                cwd=self.root,
                env=settings,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None

    def unmutated(self, tests: tuple[str, ...]) -> Record:
        """Run tests without a mutation. Some may fail, for example because a library is missing here."""
        done = self.pytest(TIMEOUT, "-p", "benchmarks.lines_per_test", *tests)
        if done is None or done.returncode > 1:
            raise SystemExit(f"{' '.join(tests)}: no results within {TIMEOUT} s without a mutation")
        return Record(**json.loads((self.root / "lines_per_test.json").read_text(encoding="utf-8")))

    def first_failure(self, tests: list[str], seconds: float) -> str | None:
        """Return the first test that fails, "" if pytest crashes or hangs, or None if all tests pass."""
        done = self.pytest(SLACK + 5 * seconds, "-x", "-rfE", *tests)
        if done is None or done.returncode != 1:
            return None if done is not None and done.returncode == 0 else ""
        lines = (line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR ")))
        names = [f"{line} - ".split(" ", 1)[1] for line in lines]
        return next((test for test in tests for name in names if name.startswith(f"{test} - ")), "")

    def kills(self, mutation: Mutation, record: Record) -> bool:
        """Return whether tests fail with a mutation that pass in the same order without it."""
        path = self.root / mutation.file
        text = path.read_text(encoding="utf-8")
        tests = record.tests(mutation)
        seconds = sum(record.seconds[test] for test in tests)
        while tests:
            path.write_text(text[: mutation.start] + mutation.new + text[mutation.stop :], encoding="utf-8")
            try:
                failure = self.first_failure(tests, seconds)
            finally:
                path.write_text(text, encoding="utf-8")
            if failure is None:
                return False
            if not failure or self.first_failure(tests[: tests.index(failure) + 1], seconds) is None:
                return True
            place = f"{mutation.file}:{mutation.line}"
            print(f"left out at {place}, fails without the mutation in this order: {failure}", flush=True)
            tests.remove(failure)
        return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--area", nargs="+", choices=AREAS, default=list(AREAS), help="default: all")
    parser.add_argument("--count", type=int, default=25, help="mutations per area (default: 25)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    parser.add_argument("--jobs", type=int, default=1, help="mutations tried at the same time (default: 1)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        copies: Queue[Repository] = Queue()
        for number in range(args.jobs):
            copies.put(Repository(Path(folder) / str(number), sys.executable))

        def in_a_copy(function: Callable[[Repository], T]) -> T:
            copy = copies.get()
            try:
                return function(copy)
            finally:
                copies.put(copy)

        def unmutated(name: str) -> Record:
            return in_a_copy(lambda copy: copy.unmutated((*AREAS[name].tests, *SURFACE)))

        def kills(mutation: Mutation, record: Record) -> bool:
            return in_a_copy(lambda copy: copy.kills(mutation, record))

        records = {name: pool.submit(unmutated, name) for name in args.area}
        tries = {}
        for name, recorded in records.items():
            record = recorded.result()
            for test in record.failed:
                print(f"{name}: left out, fails without a mutation: {test}", flush=True)
            candidates = mutations_of(AREAS[name])
            sample = random.Random(f"{args.seed} {name}").sample(candidates, min(args.count, len(candidates)))
            for mutation in sample:
                tries[pool.submit(kills, mutation, record)] = (name, mutation)
        for job in as_completed(tries):
            name, mutation = tries[job]
            results.append({"area": name, "killed": job.result(), **asdict(mutation)})
            print(
                f"{len(results)}/{len(tries)} {name} {'killed' if job.result() else 'SURVIVED':8} "
                f"{mutation.file}:{mutation.line} {mutation.old!r} → {mutation.new!r}",
                flush=True,
            )
            if args.out is not None:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    for name in args.area:
        killed = [bool(result["killed"]) for result in results if result["area"] == name]
        print(f"{name}: {sum(killed)} of {len(killed)} killed")


if __name__ == "__main__":
    main()
