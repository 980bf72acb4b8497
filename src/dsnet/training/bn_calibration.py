"""Exact statistics for the split batch norms, from one pass over the data (Re-SBN).

While a key is calibrated its norms normalise by the statistics of the current batch, and the count, sum and
sum of squares of their input are added up in float64. Statistics that were stored before are not used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.models.composite import CompositeNetwork
from dsnet.models.supernet import GateState
from dsnet.routes import Route
from dsnet.slicing import Mode, SplitBatchNorm2d, batch_statistics
from dsnet.training.evaluation import eval_mode

__all__ = ["recalibrate", "set_statistics"]

Choices = tuple[int, ...]


class _Sums:
    """Count, Σx and Σx² of the inputs of each norm and key; a `Statistics` of the pass."""

    def __init__(self) -> None:
        self.sums: dict[tuple[SplitBatchNorm2d, int], tuple[int, Tensor, Tensor]] = {}

    def __call__(self, norm: SplitBatchNorm2d, x: Tensor, key: int) -> tuple[Tensor, Tensor]:
        """Add the input of a norm; return the mean and variance of this batch."""
        wide = x.double()
        new = (x.numel() // x.shape[1], wide.sum((0, 2, 3)), wide.square().sum((0, 2, 3)))
        old = self.sums.get((norm, key))
        self.sums[norm, key] = new if old is None else (old[0] + new[0], old[1] + new[1], old[2] + new[2])
        return batch_statistics(norm, x, key)

    def apply(self, add: Callable[[Tensor], Tensor]) -> None:
        """Set the statistics; ``add`` adds the sums of other processes, in the same order."""
        values = [
            v for n, total, squares in self.sums.values() for v in (total.new_tensor([n]), total, squares)
        ]
        pieces = iter(torch.split(add(torch.cat(values)), [len(v) for v in values]))
        for norm, key in self.sums:
            count, total, squares = next(pieces), next(pieces), next(pieces)
            mean = total / count
            norm.set_statistics(key, mean, (squares / count - mean.square()).clamp(min=0), int(count))


def recalibrate(
    model: Supernet,
    batches: Iterable[Tensor],
    routes: Iterable[Route | int] | None = None,
    *,
    keep_calibrated: bool = False,
    generator: torch.Generator | None = None,
    add: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> int:
    """Compute the norm statistics of all keys that the routes use.

    The prefix and each segment run once per batch. If several gates decide and a key is shared by several
    histories of choices, it sees each previous choice equally often, and earlier ones drawn uniformly.

    Args:
        model: The network.
        batches: Images [B, C, H, W] as Stage I saw them, in batches of at least 128.
        routes: Routes to calibrate (default: all of the space).
        keep_calibrated: Keep the statistics of keys that are calibrated already.
        generator: Source of the draws.
        add: Adds up a tensor over processes that each see a share of the images.

    Returns:
        The number of images.

    Raises:
        DsnetError: There is no batch.

    Examples:
        ``recalibrate(model, (images for images, _ in data.epoch(256)))``
    """
    chosen = model.space if routes is None else [model.space.resolve(route) for route in routes]

    def run(images: Tensor, mode: Mode) -> None:
        if not isinstance(model, CompositeNetwork):
            _run_routes(model, images, sorted({route.choices for route in chosen}), mode, generator)
            return
        model.check_images(images)
        for number, member in enumerate(model.members):
            own = sorted({model.at(r)[1].choices for r in chosen if model.member_of(r) == number})
            if own:
                _run_routes(member.network, member.images(images), own, mode, generator)

    return set_statistics(model, batches, run, keep_calibrated=keep_calibrated, add=add)


def _run_routes(
    model: Supernet, images: Tensor, choices: list[Choices], mode: Mode, generator: torch.Generator | None
) -> None:
    """Run routes of a network of one image size, each key's inputs once."""
    states: dict[Choices, GateState] = {(): model.run_prefix(images, mode)}
    if model.bn_key == "stage":
        _run_pairs(model, states, choices, mode, generator)
        return
    for route in choices:  # in order, so that states of other beginnings are no longer needed
        states = {history: x for history, x in states.items() if route[: len(history)] == history}
        model.run_from_states(states, route, mode)


@torch.no_grad()
def set_statistics(
    module: nn.Module,
    batches: Iterable[Tensor],
    run: Callable[[Tensor, Mode], None],
    *,
    keep_calibrated: bool = False,
    add: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> int:
    """Set the statistics of all norms and keys that a pass uses, and count the images.

    Args:
        module: The module that holds the norms; it is in eval mode during the pass.
        batches: Images.
        run: Runs a batch in a mode that gathers statistics.
        keep_calibrated: Keep the statistics of keys that are calibrated already.
        add: Adds up a tensor over processes that each see a share of the images.

    Raises:
        DsnetError: There is no batch.
    """
    sums, count = _Sums(), 0
    with eval_mode(module):
        for images in batches:
            run(images, Mode(statistics=sums, keep_calibrated=keep_calibrated))
            count += len(images)
    if count == 0:
        raise DsnetError("no images to re-calibrate with: the data gave no batch")
    if sums.sums:  # group and layer norms have none
        sums.apply(add)
    return count


def _run_pairs(
    model: Supernet,
    states: dict[Choices, GateState],
    routes: list[Choices],
    mode: Mode,
    generator: torch.Generator | None,
) -> None:
    """Run each choice after each previous one; the choices before are drawn."""
    for gate in range(len(model.gates) - 1):
        arrived: dict[int, list[tuple[Choices, GateState]]] = {}
        for (history, state), choice in itertools.product(states.items(), sorted({r[gate] for r in routes})):
            choices = (*history, choice)
            arrived.setdefault(choice, []).append((choices, model.run_segment(state, choices, mode)))
        states = dict(
            candidates[int(torch.randint(len(candidates), (), generator=generator))]
            for candidates in arrived.values()
        )
    for (history, state), choice in itertools.product(states.items(), sorted({r[-1] for r in routes})):
        model.run_last_segment(state, (*history, choice), mode)
