"""Where programs on a GPU find what they read and put what they make: memory that never moves."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsnet.counts import Shape
from dsnet.errors import DsnetError
from dsnet.kernels.dispatch import sort_by_choice
from dsnet.kernels.gather import FeatureRows
from dsnet.kernels.rows import scatter_rows

__all__ = ["GatePlaces", "Table"]


class Table(NamedTuple):
    """Features of images [C, H, W], one row each and one that nobody reads, channels last in memory."""

    rows: Tensor  # [images + 1, H · W · C]
    shape: Shape
    widths: Tensor | None = None  # [images + 1]: channels of a row; none: zeros stand for those it lacks
    align: int = 1  # that all of these are multiples of

    @classmethod
    def like(cls, features: Tensor, images: int, channels: Collection[int] = ()) -> Table:
        """For so many images that give such features; or, read there, with some of these ``channels``."""
        rows = features.new_zeros(images + 1, features[0].numel())
        shape = Shape(*features.shape[1:])
        if not channels:
            return cls(rows, shape)
        widths = torch.zeros(images + 1, dtype=torch.int32, device=features.device)
        return cls(rows, shape, widths, min(16, math.gcd(*(count & -count for count in channels))))

    def put(self, at: Tensor, x: Tensor, by: Tensor | None = None) -> None:
        """Features [n, C, H, W] into the rows of their images, times 1 + tanh of ``by`` [n, C]."""
        by_position = x.permute(0, 2, 3, 1).reshape(len(x), -1, x.shape[1])
        scatter_rows(self.rows.view(len(self.rows), -1, self.shape[0]), at, by_position, by, self.widths)

    def read(self, at: Tensor) -> FeatureRows:
        """The features of some images [n], where they are."""
        return FeatureRows(self.rows, at, self.shape, self.widths, self.align)

    def get(self, at: Tensor) -> Tensor:
        """The features of some images [n]."""
        return self.read(at).dense


class GatePlaces:
    """What a gate has to itself, and how images are sorted by its decisions.

    A *pair* is the choice before and the gate's own, as one number; both by their place among those held.
    Where parts stand in for all choices before, it is the gate's own alone.
    """

    def __init__(
        self,
        choices: Sequence[int],
        held: Sequence[int],
        before: int,
        taken: Tensor,  # [images]: what they take, by place among those held
        scores: Tensor,
        told: Tensor,  # on the host: how many images take each pair
    ) -> None:
        device, images = scores.device, len(taken)
        self.held, self.pairs, self.told = held, len(told), told
        self.places = torch.tensor([held.index(c) for c in choices], device=device)  # of scores among held
        self.scores = torch.zeros(images + 1, len(choices), dtype=scores.dtype, device=device)
        self.prices = torch.zeros(before, len(choices), dtype=torch.float64, device=device)
        self.taken = taken
        self.earlier = torch.zeros(images + 1, dtype=torch.long, device=device)  # all choices before
        self.order = torch.zeros(images, dtype=torch.long, device=device)  # of images, by what they take
        self.counts = torch.zeros(self.pairs, dtype=torch.long, device=device)
        self.starts = torch.zeros(self.pairs, dtype=torch.long, device=device)
        self.choices = torch.tensor(held, device=device)

    def settle(
        self, images: int, valid: Tensor, previous: Tensor | None, *, paired: bool, decided: bool = False
    ) -> None:
        """Takes the best score less its price unless it is ``decided``, sorts images, and tells the host.

        ``previous`` are choices before, where there are any; with ``paired`` images are sorted by them, too.
        """
        sort_by_choice(
            self.taken,
            self.order,
            self.counts,
            self.starts,
            images,
            valid,
            scores=None if decided else self.scores,
            penalties=self.prices,
            choice_index=self.places,
            previous=previous,
            paired_choices=len(self.held) if paired else 0,
        )
        self.told.copy_(self.counts, non_blocking=True)

    def places_of(self, choices: Tensor) -> Tensor:
        """Of choices [n] among those that are held."""
        found = torch.searchsorted(self.choices, choices.contiguous()).clamp_(max=len(self.held) - 1)
        missing = self.choices[found] != choices
        if bool(missing.any()):
            raise DsnetError(f"this plan does not hold the choices [{int(choices[missing][0])}]")
        return found

    def everyone(self, rows: Tensor, images: Tensor) -> None:
        """All images as they came, for whichever pair is run."""
        self.order[: len(rows)].copy_(rows)
        self.counts.copy_(images.expand(self.pairs))
        self.starts.zero_()

    def only(self, wanted: Tensor) -> None:
        """Some images in front of the others, for whichever pair is run; tells the host how many."""
        self.order[: len(wanted)].copy_((~wanted).to(torch.long).argsort(stable=True))
        self.counts.copy_(wanted.sum().expand(self.pairs))
        self.starts.zero_()
        self.told.copy_(self.counts, non_blocking=True)
