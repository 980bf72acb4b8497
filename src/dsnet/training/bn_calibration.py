"""Exact statistics for the split batch norms, from one pass over the data (Re-SBN).

While a key is calibrated its norms normalise by the current batch's own statistics, and count, sum and sum of
squares of their input are added up in float64; what was stored before is neither used nor mixed in.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.models.supernet import GateState
from dsnet.routes import Route
from dsnet.slicing import Mode, SplitBatchNorm2d, batch_statistics

__all__ = ["recalibrate", "set_statistics"]


class Sums:
    """Count, Σx and Σx² of what every (norm, key) got; a `Statistics` of the pass."""

    def __init__(self) -> None:
        self.sums: dict[tuple[SplitBatchNorm2d, int], tuple[int, Tensor, Tensor]] = {}

    def __call__(self, norm: SplitBatchNorm2d, x: Tensor, key: int) -> tuple[Tensor, Tensor]:
        """Adds what a norm gets, and gives the mean and variance of this batch."""
        wide = x.double()
        new = (x.numel() // x.shape[1], wide.sum((0, 2, 3)), wide.square().sum((0, 2, 3)))
        old = self.sums.get((norm, key))
        self.sums[norm, key] = new if old is None else (old[0] + new[0], old[1] + new[1], old[2] + new[2])
        return batch_statistics(norm, x, key)

    def apply(self, add: Callable[[Tensor], Tensor]) -> None:
        """Sets the statistics; ``add`` adds what other processes have summed, in the same order."""
        values = [
            v for n, total, squares in self.sums.values() for v in (total.new_tensor([n]), total, squares)
        ]
        pieces = iter(torch.split(add(torch.cat(values)), [len(v) for v in values]))
        for norm, key in self.sums:
            everyone, total, squares = next(pieces), next(pieces), next(pieces)
            mean = total / everyone
            norm.set_statistics(key, mean, (squares / everyone - mean.square()).clamp(min=0), int(everyone))


def recalibrate(
    model: Supernet,
    batches: Iterable[Tensor],
    routes: Iterable[Route | int] | None = None,
    *,
    generator: torch.Generator | None = None,
    add: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> int:
    """Sets the statistics of every key that the routes use (all of the space by default); counts the images.

    The prefix runs once a batch, whatever the number of routes. Where several gates decide and a key stands
    for many histories, it sees every previous choice equally often, and those before drawn uniformly; keys by
    prefix see all of them. Use images as Stage I saw them, in batches of at least 128.
    Where several processes each see a share of the images, ``add`` adds up a tensor over them.
    """
    wanted = {model.space.resolve(r).choices for r in routes} if routes is not None else None
    reach = sorted(wanted if wanted is not None else (route.choices for route in model.space))

    def run(images: Tensor, mode: Mode) -> None:
        model.check_images(images)
        state = model.run_prefix(images, mode)
        if model.bn_key == "prefix":
            _every_history(model, state, (), reach, mode)
        else:
            _every_pair(model, state, reach, mode, generator)

    return set_statistics(model, batches, run, add=add)


@torch.no_grad()
def set_statistics(
    module: nn.Module,
    batches: Iterable[Tensor],
    run: Callable[[Tensor, Mode], None],
    *,
    add: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> int:
    """Set the statistics of all norms and keys that a pass uses, and count the images.

    Args:
        module: The module that holds the norms; it is in eval mode during the pass.
        batches: Images.
        run: Runs a batch in a mode that gathers statistics.
        add: Adds up a tensor over processes that each see a share of the images.

    Raises:
        DsnetError: There is no batch.
    """
    training = module.training
    module.eval()
    sums, seen = Sums(), 0
    mode = Mode(statistics=sums)
    try:
        for images in batches:
            run(images, mode)
            seen += len(images)
    finally:
        module.train(training)
    if seen == 0:
        raise DsnetError("no images to re-calibrate with: the data gave no batch")
    if sums.sums:  # group and layer norms have none
        sums.apply(add)
    return seen


def _every_history(
    model: Supernet, state: GateState, history: tuple[int, ...], reach: list[tuple[int, ...]], mode: Mode
) -> None:
    """Keys by prefix: runs all that can follow ``history``, depth first."""
    gate = len(history)
    for choice in sorted({r[gate] for r in reach}):
        made = (*history, choice)
        if len(made) == len(model.gates):
            model.run_last_segment(state, made, mode)
        else:
            onward = [r for r in reach if r[gate] == choice]
            _every_history(model, model.run_segment(state, made, mode), made, onward, mode)


def _every_pair(
    model: Supernet,
    state: GateState,
    reach: list[tuple[int, ...]],
    mode: Mode,
    generator: torch.Generator | None,
) -> None:
    """Keys by stage: runs every choice behind every previous one; what lies further back is drawn."""
    stands: list[tuple[tuple[int, ...], GateState]] = [((), state)]
    for gate in range(len(model.gates)):
        arrived: dict[int, list[tuple[tuple[int, ...], GateState]]] = {}
        for (history, before), choice in itertools.product(stands, sorted({r[gate] for r in reach})):
            made = (*history, choice)
            if len(made) == len(model.gates):
                model.run_last_segment(before, made, mode)
            else:
                arrived.setdefault(choice, []).append((made, model.run_segment(before, made, mode)))
        stands = [ways[int(torch.randint(len(ways), (), generator=generator))] for ways in arrived.values()]
