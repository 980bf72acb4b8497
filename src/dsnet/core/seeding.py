"""Random generators by purpose and position: a run's draws depend on its seed and its position alone.

So a resumed run continues with the same draws without saved state, and ranks share the draws they must share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["global_seed", "reseed", "seeded"]


def _number(seed: int, purpose: str, *position: int) -> int:
    text = f"{seed} {purpose} {' '.join(map(str, position))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def seeded(seed: int, purpose: str, *position: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator for one purpose at one position (an epoch, a step, a rank)."""
    return torch.Generator(device).manual_seed(_number(seed, purpose, *position))


def reseed(generator: torch.Generator, seed: int, purpose: str, *position: int) -> None:
    """Seed an existing generator like `seeded`."""
    generator.manual_seed(_number(seed, purpose, *position))


@contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Seed torch's global generator for libraries that draw from it; restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
