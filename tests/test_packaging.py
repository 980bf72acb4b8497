"""What pip is told, and what messages and documents say about it, agree."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from dsnet.errors import DISTRIBUTION, install_hint

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def calls_of(function: str) -> list[ast.Call]:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == function]


def test_messages_name_the_distribution_and_an_extra_that_exists() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert PROJECT["scripts"] == {"dsnet": "dsnet_command:main"}
    extras = [ast.literal_eval(call.args[0]) for call in calls_of("install_hint")]
    assert {"train", "datasets", "timm", "export", "openvino"} <= set(extras)
    assert set(extras) <= set(PROJECT["optional-dependencies"])
    assert install_hint("train") == f"pip install '{DISTRIBUTION}[train]'"


def test_nothing_names_the_distribution_of_others() -> None:
    for path in [*SOURCES, *PAGES, ROOT / "Makefile"]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\bdsnet\[|pip install '?dsnet\b(?!-)", text), path


def test_documents_and_makefile_install_extras_that_exist() -> None:
    named = set()
    for path in [*PAGES, ROOT / "Makefile"]:
        for extras in re.findall(r"-e '\.\[([\w,]+)\]'", path.read_text(encoding="utf-8")):
            named |= set(extras.split(","))
    assert named
    assert named <= set(PROJECT["optional-dependencies"])


def test_the_demo_installs_no_tools_of_developers() -> None:
    """`make demo` takes the extra `demo`, and what it installs is part of what training installs."""
    extras = PROJECT["optional-dependencies"]
    assert set(extras["demo"]) <= set(extras["train"]) & set(extras["dev"])


def test_the_checks_run_with_pinned_versions() -> None:
    """A looser torch would fetch gigabytes of CUDA libraries for a check on a CPU."""
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    )
    needed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    names = {re.match(r"[\w.-]+", requirement)[0] for requirement in needed}
    assert names <= set(pins)
    assert "-c constraints.txt" in (ROOT / "Makefile").read_text(encoding="utf-8")


MAKE = shutil.which("make")


@pytest.mark.skipif(MAKE is None, reason="make is not installed")
@pytest.mark.parametrize("linked", [False, True], ids=["folder", "link"])
@pytest.mark.parametrize("first", ["demo", "lint"])
def test_demo_and_checks_set_up_one_environment_in_either_order(
    tmp_path: Path, first: str, linked: bool
) -> None:
    """With a stand-in for Python: what is installed, how often, and into which folder."""
    home = tmp_path / "checkout"
    home.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, home)
    if linked:
        (home / ".venv").symlink_to(tmp_path / "elsewhere")
    log = tmp_path / "log"
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN.format(log=log, python=sys.executable), encoding="utf-8")
    stand_in.chmod(0o755)

    def installed(*targets: str) -> list[str]:
        log.write_text("", encoding="utf-8")
        for target in targets:
            command = [str(MAKE), "--no-print-directory", target, f"PYTHON={stand_in}"]
            subprocess.run(command, cwd=home, check=True, capture_output=True, timeout=60)
        return re.findall(r"-e \.\[(\w+)\]", log.read_text(encoding="utf-8"))

    second = "lint" if first == "demo" else "demo"
    assert installed(first, second) == (["demo", "dev"] if first == "demo" else ["dev"])
    assert installed(first, second) == [], "all is there"
    assert (home / ".venv").is_symlink() == linked
    later = time.time() + 5
    os.utime(home / "pyproject.toml", (later, later))
    assert installed("demo") == ["demo"], "requirements that changed"


# makes an environment of stand-ins, and notes what it is called with
STAND_IN = """#!/bin/sh
echo "$0 $*" >> {log}
case "$1 $2" in
  "-c "*) exec {python} "$@" ;;
  "-m venv") mkdir -p "$3/bin" && for name in python dsnet ruff mypy; do cp "$0" "$3/bin/$name"; done ;;
esac
"""
