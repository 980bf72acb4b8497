"""Mutation testing: change one operator or constant of the source and see whether the tests notice.

    python -m benchmarks.mutation --area slicing --count 25
    python -m benchmarks.mutation --out build/mutation.json      # all areas; hours on two cores

Mutations are sampled with a seed, so two runs on the same source try the same ones. Each runs the tests of
its area in a copy of the repository, until the first failure. Survivors are printed with file, line and
change: either a test is missing, or the change makes no observable difference.
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
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 900  # seconds a mutation's tests may run; a mutant that hangs counts as killed


@dataclass(frozen=True)
class Area:
    """Source files, and the tests that must notice a change in them."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]


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
        ("tests/test_gate.py", "tests/models", "tests/test_extract.py", "tests/test_cost.py"),
    ),
    "routing": Area(
        ("src/dsnet/routing/*.py", "src/dsnet/calibration/*.py"), ("tests/routing", "tests/calibration")
    ),
    "runtime": Area(
        ("src/dsnet/runtime/*.py", "src/dsnet/runtime/partition/*.py", "src/dsnet/runtime/executors/*.py"),
        ("tests/runtime",),
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
        self.mutations: list[Mutation] = []

    def offset(self, line: int, column: int) -> int:
        """Turn a position of `ast`, whose columns count bytes, into a character offset."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def add(self, line: int, start: int, stop: int, new: str) -> None:
        self.mutations.append(Mutation(self.file, line, start, stop, self.text[start:stop], new))

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


def tests_fail(copy: Path, tests: tuple[str, ...], python: str) -> bool:
    """Return whether the tests of an area fail in a copy of the repository."""
    command = [python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    settings = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=copy, env=settings, capture_output=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def try_area(name: str, count: int, seed: int, copy: Path, python: str) -> Iterator[dict[str, object]]:
    """Run the tests of an area on ``count`` of its mutations."""
    area = AREAS[name]
    candidates = mutations_of(area)
    chosen = random.Random(f"{seed} {name}").sample(candidates, min(count, len(candidates)))
    if tests_fail(copy, area.tests, python):
        raise SystemExit(f"{name}: the tests fail without a mutation")
    for number, mutation in enumerate(chosen, 1):
        path = copy / mutation.file
        text = path.read_text(encoding="utf-8")
        path.write_text(text[: mutation.start] + mutation.new + text[mutation.stop :], encoding="utf-8")
        began = time.monotonic()
        try:
            killed = tests_fail(copy, area.tests, python)
        finally:
            path.write_text(text, encoding="utf-8")
        verdict = "killed" if killed else "SURVIVED"
        print(
            f"{name} {number}/{len(chosen)} {verdict:8} {mutation.file}:{mutation.line} "
            f"{mutation.old!r} → {mutation.new!r}  {time.monotonic() - began:.0f} s",
            flush=True,
        )
        yield {"area": name, "killed": killed, **asdict(mutation)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--area", nargs="+", choices=AREAS, default=list(AREAS), help="default: all")
    parser.add_argument("--count", type=int, default=25, help="mutations per area (default: 25)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repository"
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "runs", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for name in args.area:
            results += try_area(name, args.count, args.seed, copy, sys.executable)
            mine = [result for result in results if result["area"] == name]
            killed = sum(bool(result["killed"]) for result in mine)
            print(f"{name}: {killed} of {len(mine)} killed", flush=True)
            if args.out is not None:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
