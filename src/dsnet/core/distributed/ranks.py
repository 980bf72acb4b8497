"""Ranks: several processes, started by torchrun, that train one network.

Gradients of all networks of a step add up on each rank and are reduced once. `DistributedDataParallel` does
not fit: it reduces at the last backward pass and leaves out parameters that this pass, of the smallest
network, does not use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsnet.core.distributed.launch import launched
from dsnet.core.distributed.link import Link, LostContactError, all_reduce, barrier
from dsnet.errors import DsnetError

__all__ = ["ALONE", "Ranks", "joined"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The rank of this process, and reductions over all ranks of a run."""

    rank: int = 0
    world: int = 1
    link: Link | None = field(default=None, compare=False, repr=False)

    @property
    def first(self) -> bool:
        """Whether this process writes and reports."""
        return self.rank == 0

    def share(self, total: int, what: str) -> int:
        """Return the equal share of every rank in ``total``; errors name the setting ``what``."""
        if total % self.world:
            raise DsnetError(f"{what}={total} does not divide by {self.world} ranks")
        return total // self.world

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over ranks; ``values`` stay unchanged."""
        if self.world == 1:
            return values
        total = values.clone()
        all_reduce(total)
        return total

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every gradient by its mean over ranks, in one reduction per data type."""
        if self.world == 1:
            return
        groups: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            groups.setdefault(parameter.dtype, []).append(parameter)
        for members in groups.values():
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in members]
            flat = torch.cat([g.reshape(-1) for g in gradients])
            all_reduce(flat)
            flat /= self.world
            pieces = torch.split(flat, [g.numel() for g in gradients])
            for parameter, piece, gradient in zip(members, pieces, gradients, strict=True):
                gradient.copy_(piece.view_as(gradient))
                parameter.grad = gradient

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        if self.world == 1:
            return flag
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        return bool(self.sum(torch.tensor(int(flag), device=device)))

    def wait(self) -> None:
        """Return when all ranks have called this."""
        if self.world > 1:
            barrier()

    def agree(self, facts: Callable[[], Mapping[str, Any]], what: str) -> None:
        """Raise on all ranks if these facts differ between ranks; errors call the facts ``what``."""
        if self.link is not None:
            self.link.agree(facts(), what)


ALONE = Ranks()
TIMEOUT = 300.0  # seconds


@contextmanager
def joined(
    device: torch.device,
    *,
    timeout: float = TIMEOUT,
    kept: Callable[[], str] = lambda: "start all processes again",
) -> Iterator[Ranks]:
    """Join the processes that torchrun started, if it did.

    Args:
        device: Device of this process.
        timeout: Seconds without a sign of life after which a rank is lost.
        kept: Returns a sentence on where the run can continue, for errors.

    Raises:
        LostRankError: If another rank is lost or stops with an error; the message names it.
    """
    launch = launched()
    if not launch.several:
        yield ALONE
        return
    cuda = device.type == "cuda"
    link = Link(launch, timeout, kept)
    succeeded = False
    try:
        link.join()
        # NCCL ends the process if it waits too long: the link reports the reason before that.
        limit = timedelta(seconds=timeout + 60 if cuda else timeout)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=link.group_store(),
            rank=launch.rank,
            world_size=launch.world,
            timeout=limit,
            device_id=device if cuda else None,
        )
        yield Ranks(rank=launch.rank, world=launch.world, link=link)
        succeeded = True
    except LostContactError as error:
        raise link.blame(error) from error
    except BaseException as error:
        link.failed(error)
        raise
    finally:
        if dist.is_initialized() and (succeeded or not cuda):  # NCCL would wait forever
            dist.destroy_process_group()
        link.leave()
