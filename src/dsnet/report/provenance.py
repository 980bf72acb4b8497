"""The provenance of a file of figures: machine, versions, date, commit and command."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import torch

import dsnet

__all__ = ["UNKNOWN", "Code", "code_version", "provenance"]

UNKNOWN = "unknown"
VARIABLE = "DSNET_COMMIT"  # for a copy of the source without its git history
CHECKOUT = Path(__file__).parents[3]
MEASURED = ("src", "benchmarks", ":!benchmarks/results")  # paths whose changes count as dirty


class Code(NamedTuple):
    """A commit, and whether the code that ran differs from it."""

    commit: str
    dirty: bool | str


def code_version(checkout: Path = CHECKOUT) -> Code:
    """Return the commit of this code: from git, else from DSNET_COMMIT, else unknown.

    DSNET_COMMIT is what ``git describe --always --dirty --exclude '*'`` printed where the copy was made. A
    package installed inside another repository is not that repository's code: git must track this file.
    """
    try:
        _git(checkout, "ls-files", "--error-unmatch", "src/dsnet/report/provenance.py")
        commit = _git(checkout, "rev-parse", "--short", "HEAD").strip()
        return Code(commit, bool(_git(checkout, "status", "--porcelain", "--", *MEASURED).strip()))
    except (OSError, subprocess.CalledProcessError):
        given = os.environ.get(VARIABLE, "").strip()
    if not given:
        return Code(UNKNOWN, UNKNOWN)
    return Code(given.removesuffix("-dirty"), given.endswith("-dirty"))


def provenance(machine: str, command: str) -> dict[str, Any]:
    """Return the provenance that every file of figures begins with."""
    code = code_version()
    return {
        "machine": machine,
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "version": dsnet.__version__,
        "commit": code.commit,
        "dirty": code.dirty,
        "command": command,
    }


def _git(checkout: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(checkout), *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout
