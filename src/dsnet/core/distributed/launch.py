"""The rank of this process, as torchrun passes it through the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from dsnet.errors import DsnetError, shorten

__all__ = ["Launch", "launched"]

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LOCAL_WORLD = "LOCAL_WORLD_SIZE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """This process among those that were started together."""

    rank: int = 0
    world: int = 1
    local: int = 0  # among those of this machine
    local_world: int | None = None  # number of processes on this machine, if torchrun says it
    host: str = ""  # of rank 0; empty: a single process
    port: int = 0
    restart: str = "0"  # number of restarts by torchrun
    agent: bool = False  # whether torchrun hosts the store

    @property
    def several(self) -> bool:
        """Whether there is a process group to join."""
        return self.host != ""


def launched() -> Launch:
    """Read the environment; without torchrun, a single process.

    Raises:
        DsnetError: If variables are missing or contradict each other.
    """
    given = {name: os.environ[name] for name in NAMES if os.environ.get(name)}
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(given):
        return Launch()
    missing = [name for name in NAMES if name not in given]
    if missing:
        raise DsnetError(
            f"the environment sets {', '.join(given)} but not {', '.join(missing)}: start with torchrun, set "
            f"all of {', '.join(NAMES)}, or none of them to train with one process"
        )
    world = _number(given, "WORLD_SIZE", 1)
    return Launch(
        rank=_number(given, "RANK", 0, world - 1, f"below WORLD_SIZE={world}"),
        world=world,
        local=_number(given, "LOCAL_RANK", 0, world - 1, f"below WORLD_SIZE={world}"),
        local_world=_number(os.environ, LOCAL_WORLD, 1) if os.environ.get(LOCAL_WORLD) else None,
        host=given["MASTER_ADDR"],
        port=_number(given, "MASTER_PORT", 1, 65535, "a port, 1 to 65535"),
        restart=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        agent=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _number(given: Mapping[str, str], name: str, minimum: int, maximum: int = 2**31, what: str = "") -> int:
    text, problem = given[name].strip(), f"the environment sets {name}={shorten(given[name])}: expected"
    if not (text.isascii() and text.isdecimal()):
        raise DsnetError(f"{problem} a whole number of at least {minimum}")
    number = int(text) if len(text) < 20 else maximum + 1
    if not minimum <= number <= maximum:
        raise DsnetError(f"{problem} {what or f'at least {minimum}'}")
    return number
