"""The number of CPUs that this process may use, by its affinity and its control group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["available_cpus", "cgroup_quota"]


def available_cpus() -> int:
    """Return the number of CPUs by affinity or, if lower, the cgroup's quota (rounded down, at least 1)."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def cgroup_quota(root: Path = Path("/")) -> float | None:
    """Return the CPUs that the control groups of this process grant, version 1 or 2; None: no limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux, or no permission
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "-", "")
        if controllers == "":  # version 2
            quotas += [_version_2(folder) for folder in _folders(root / "sys/fs/cgroup", path)]
        elif "cpu" in controllers.split(","):
            for name in dict.fromkeys(("cpu", controllers)):
                quotas += [_version_1(folder) for folder in _folders(root / "sys/fs/cgroup" / name, path)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _folders(mount: Path, path: str) -> Iterator[Path]:
    """Yield the folders of a group and of its parents; a container may see only the outermost one."""
    group = PurePosixPath(path.lstrip("/"))
    if ".." in group.parts:
        group = PurePosixPath()
    for part in (group, *group.parents):
        yield mount / part


def _version_2(folder: Path) -> float | None:
    words = _words(folder / "cpu.max")
    return _ratio(*words) if len(words) == 2 else None


def _version_1(folder: Path) -> float | None:
    words = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
    return _ratio(*words) if len(words) == 2 else None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []


def _ratio(quota: str, period: str) -> float | None:
    """Return quota / period; None for ``max`` and -1, which mean no limit."""
    try:
        granted, of = int(quota), int(period)
    except ValueError:
        return None
    return granted / of if granted > 0 and of > 0 else None
