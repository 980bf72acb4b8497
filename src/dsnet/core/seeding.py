"""Random generators by purpose and position: a run's draws are a function of its seed and of where it stands.

Nothing has to be saved to go on with the same draws, and ranks share those that they must share.
"""

from __future__ import annotations

import hashlib

import torch

__all__ = ["reseed", "seeded"]


def _number(seed: int, purpose: str, *position: int) -> int:
    text = f"{seed} {purpose} {' '.join(map(str, position))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def seeded(seed: int, purpose: str, *position: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for one purpose at one position (an epoch, a step, a rank)."""
    return torch.Generator(device).manual_seed(_number(seed, purpose, *position))


def reseed(generator: torch.Generator, seed: int, purpose: str, *position: int) -> None:
    """`seeded` for a generator that is there already, so that whoever holds it draws from there."""
    generator.manual_seed(_number(seed, purpose, *position))
