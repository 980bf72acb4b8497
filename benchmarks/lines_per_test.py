"""A pytest plugin that records which tests execute which lines of `src`, and how long each test takes.

    LINES_PER_TEST=build/lines.json python -m pytest -p benchmarks.lines_per_test tests/routing

The file holds the seconds of each test that passed, the tests that failed, and for each file and line the
tests that executed it. A line that was executed outside tests, such as the body of a class, belongs to all
tests. Tests share the fixtures of a module or session, and the results of functions with `functools.cache`
in `tests`: all tests that use one count as executing its lines, not only the first. Not seen are lines
executed in subprocesses or traced by a compiler, and caches of the package itself.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import pkgutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[1]
COVERAGE = coverage.Coverage(data_file=None, config_file=False, source=[str(ROOT / "src")])


class Recorder:
    """Gives coverage.py the test, shared fixture or cached call that executes lines now, as its context."""

    def __init__(self) -> None:
        self.context = ""  # outside tests
        self.users: defaultdict[str, set[str]] = defaultdict(set)  # of a shared fixture or a cached call
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.failed: set[str] = set()

    @contextmanager
    def inside(self, context: str) -> Iterator[None]:
        before, self.context = self.context, context
        COVERAGE.switch_context(context)
        try:
            yield
        finally:
            self.context = before
            COVERAGE.switch_context(before)

    def cache(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Do what `functools.cache` does, and note who uses the results of tests' functions."""
        cached = cache(function)
        if not function.__module__.startswith("tests."):
            return cached

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            name = f"{function.__module__}.{function.__qualname__} {hash((args, *kwargs.items()))}"
            self.users[name].add(self.context)
            with self.inside(name):
                return cached(*args, **kwargs)

        call.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
        return call

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        with self.inside(item.nodeid):
            for name in getattr(item, "fixturenames", ()):
                self.users[f"fixture {name}"].add(item.nodeid)
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        name = f"fixture {fixturedef.argname}"
        self.users[name].add(self.context)
        with self.inside(name):
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_sessionstart(self) -> None:
        """Import all modules, so that none of their lines seems to belong to the test that imports it."""
        COVERAGE.start()
        for module in pkgutil.walk_packages([str(ROOT / "src" / "dsnet")], "dsnet."):
            if module.name != "dsnet.__main__":
                importlib.import_module(module.name)

    def tests(self, contexts: set[str]) -> list[str]:
        """Return the tests among contexts, and those that use one of the contexts."""
        passed, found = self.seconds.keys() - self.failed, set[str]()
        while contexts:
            found |= contexts
            contexts = {user for context in contexts for user in self.users[context]} - found
        return sorted(passed if "" in found else passed & found)  # "": outside tests

    def pytest_sessionfinish(self) -> None:
        COVERAGE.stop()
        data = COVERAGE.get_data()
        lines = {
            Path(file).relative_to(ROOT).as_posix(): {
                line: self.tests(set(contexts)) for line, contexts in data.contexts_by_lineno(file).items()
            }
            for file in data.measured_files()
        }
        seconds = {test: time for test, time in self.seconds.items() if test not in self.failed}
        record = {"seconds": seconds, "failed": sorted(self.failed), "lines": lines}
        Path(os.environ["LINES_PER_TEST"]).write_text(json.dumps(record), encoding="utf-8")


cache = functools.cache
RECORDER = Recorder()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RECORDER)
    mock.patch("functools.cache", RECORDER.cache).start()
