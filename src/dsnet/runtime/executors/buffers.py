"""Fixed memory of captured programs: tables of features, and the decisions of a gate."""

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

__all__ = ["FeatureTable", "GateBuffers"]


class FeatureTable(NamedTuple):
    """Features of images [C, H, W], channels last, one row per image and a last row for padding."""

    rows: Tensor  # [images + 1, H · W · C]
    shape: Shape
    widths: Tensor | None = None  # [images + 1]: channels of a row; None: missing channels are zeros
    align: int = 1  # a divisor of all widths

    @classmethod
    def allocate(cls, features: Tensor, images: int, widths: Collection[int] = ()) -> FeatureTable:
        """Allocate a table for features like these; with ``widths``, rows have one of these widths."""
        rows = features.new_zeros(images + 1, features[0].numel())
        shape = Shape(*features.shape[1:])
        if not widths:
            return cls(rows, shape)
        row_widths = torch.zeros(images + 1, dtype=torch.int32, device=features.device)
        return cls(rows, shape, row_widths, min(16, math.gcd(*(width & -width for width in widths))))

    def scatter(self, index: Tensor, x: Tensor, scale: Tensor | None = None) -> None:
        """Write features [n, C, H, W], times 1 + tanh of ``scale`` [n, C], to the rows ``index`` [n]."""
        by_position = x.permute(0, 2, 3, 1).reshape(len(x), -1, x.shape[1])
        scatter_rows(
            self.rows.view(len(self.rows), -1, self.shape[0]), index, by_position, scale, self.widths
        )

    def view(self, index: Tensor) -> FeatureRows:
        """Refer to the features of images ``index`` [n] without a copy."""
        return FeatureRows(self.rows, index, self.shape, self.widths, self.align)

    def gather(self, index: Tensor) -> Tensor:
        """Return the features of images ``index`` [n]."""
        return self.view(index).dense


class GateBuffers:
    """Scores and decisions of a gate for a batch, and the images sorted by them.

    Images are sorted by *pair*: the choice of the gate before and the gate's own as one index; where segments
    are shared by all choices before, the gate's own choice alone.

    Args:
        scored: Choices that the gate scores.
        choices: All choices that occur, ascending: those with a segment and those that the gate scores.
        num_previous: Number of choices of the gate before; 1 at the first gate.
        chosen: The decision of each image [images], as an index into ``choices``.
        scores: Scores like those that will be written.
        host_counts: Host memory for the number of images of each pair.
    """

    def __init__(
        self,
        scored: Sequence[int],
        choices: Sequence[int],
        num_previous: int,
        chosen: Tensor,
        scores: Tensor,
        host_counts: Tensor,
    ) -> None:
        device, images = scores.device, len(chosen)
        self.choices, self.num_pairs, self.host_counts = choices, len(host_counts), host_counts
        self.choice_index = torch.tensor([choices.index(c) for c in scored], device=device)  # by score
        self.scores = torch.zeros(images + 1, len(scored), dtype=scores.dtype, device=device)
        self.penalties = torch.zeros(num_previous, len(scored), dtype=torch.float64, device=device)
        self.chosen = chosen
        self.history = torch.zeros(images + 1, dtype=torch.long, device=device)  # all choices before, as one
        self.order = torch.zeros(images, dtype=torch.long, device=device)  # images, sorted by pair
        self.counts = torch.zeros(self.num_pairs, dtype=torch.long, device=device)
        self.starts = torch.zeros(self.num_pairs, dtype=torch.long, device=device)
        self._choice_values = torch.tensor(choices, device=device)

    def sort_images(
        self, images: int, valid: Tensor, previous: Tensor | None, *, paired: bool, decide: bool = True
    ) -> None:
        """Take the choices of the largest score less penalty, sort images by pair, and send the counts.

        Args:
            images: Size of the batch with padding.
            valid: Number of images without padding [1].
            previous: Choices of the gate before [images], if there is one.
            paired: Sort by these as well.
            decide: False: keep `chosen` as it is.
        """
        sort_by_choice(
            self.chosen,
            self.order,
            self.counts,
            self.starts,
            images,
            valid,
            scores=self.scores if decide else None,
            penalties=self.penalties,
            choice_index=self.choice_index,
            previous=previous,
            paired_choices=len(self.choices) if paired else 0,
        )
        self.host_counts.copy_(self.counts, non_blocking=True)

    def index_of(self, choices: Tensor) -> Tensor:
        """Return the index of choices [n]; raise an error if one does not occur."""
        index = torch.searchsorted(self._choice_values, choices.contiguous())
        index = index.clamp_(max=len(self.choices) - 1)
        missing = self._choice_values[index] != choices
        if bool(missing.any()):
            raise DsnetError(f"this plan does not hold the choices [{int(choices[missing][0])}]")
        return index

    def select_all(self, rows: Tensor, images: Tensor) -> None:
        """Select all ``images`` [1] in their order, for whichever pair runs next."""
        self.order[: len(rows)].copy_(rows)
        self.counts.copy_(images.expand(self.num_pairs))
        self.starts.zero_()

    def select(self, mask: Tensor) -> None:
        """Select the images of a mask for whichever pair runs next, and send their number."""
        self.order[: len(mask)].copy_((~mask).to(torch.long).argsort(stable=True))
        self.counts.copy_(mask.sum().expand(self.num_pairs))
        self.starts.zero_()
        self.host_counts.copy_(self.counts, non_blocking=True)
