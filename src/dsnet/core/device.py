"""Devices by name."""

from __future__ import annotations

import re

import torch

from dsnet.core.distributed.launch import launched
from dsnet.errors import DsnetError, shorten

__all__ = ["pick_device"]


def pick_device(name: str) -> torch.device:
    """Return a device by name.

    Args:
        name: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``: a GPU if there is one; each process of torchrun gets
            one of its own.

    Raises:
        DsnetError: If this machine has no such device.
    """
    if name != "auto":
        match = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if match is None or (name != "cpu" and int(match[1] or 0) >= count):
            has = f"this machine has {count} CUDA devices" if count else "this machine has no CUDA device"
            raise DsnetError(f"device={shorten(name)} is not possible: auto, cpu, cuda or cuda:N; {has}")
        return torch.device(name)
    local = launched().local
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local >= torch.cuda.device_count():
        raise DsnetError(
            f"LOCAL_RANK={local}, but this machine has {torch.cuda.device_count()} CUDA devices: start as "
            "many processes on it as it has devices, or set device=cpu"
        )
    return torch.device("cuda", local)
