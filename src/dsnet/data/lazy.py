"""Images decoded on demand by worker processes: sets that memory has no room for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from dsnet.data.dataset import (
    Crops,
    channel_statistics,
    check_labels,
    check_ratio,
    divided,
    epoch_order,
    held_out,
)
from dsnet.data.decode import Damage, Items, pillow, processors
from dsnet.data.decode_workers import Work, run
from dsnet.errors import DsnetError

__all__ = ["LazySet"]

CPU = torch.device("cpu")
SAMPLE = 2000  # images that statistics are taken from


def default_workers() -> int:
    """One processor is left to the process that trains."""
    return min(8, processors() - 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LazySet:
    """Images that worker processes read and decode when a batch needs them; labels [N] are on the CPU.

    In the place of an image that cannot be read stands the next good one of its batch, with the label of that
    one, so batches keep their size; the damaged one is reported once, and too many stop the run (`damage`).

    Workers start anew for every pass and import the main script, so a script that uses them guards what it
    does with ``if __name__ == "__main__":``.
    """

    crops_in_workers: ClassVar[bool] = True

    name: str
    items: Items = field(repr=False)
    labels: Tensor = field(repr=False)
    classes: tuple[str, ...]
    size: int
    ratio: float = 1.0  # of size to the shorter side that images are resized to; 0.875 is usual for ImageNet
    workers: int = field(default_factory=default_workers)  # 0: decode in this process
    prefetch: int = 2  # batches that every worker keeps ready
    device: torch.device = CPU
    positions: Tensor | None = field(default=None, repr=False)  # [N] among the items; None: all, in order
    damage: Damage = field(default_factory=Damage, repr=False)  # shared by all sets taken from this one

    def __post_init__(self) -> None:
        count = len(self.items) if self.positions is None else len(self.positions)
        check_labels(self.name, count, self.labels, self.classes)
        if self.size < 1:
            raise DsnetError(f"{self.name}: images must have a size of at least 1, not {self.size}")
        check_ratio(f"{self.name}: ratio", self.ratio)
        if self.workers < 0 or self.prefetch < 1:
            raise DsnetError(
                f"{self.name}: workers must be at least 0 and prefetch at least 1, "
                f"not {self.workers} and {self.prefetch}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def damaged(self) -> int:
        """Images that could not be read, of those that were looked at so far."""
        return len(self.damage.reasons)

    def to(self, device: torch.device | str) -> Self:
        """The same set, its batches on a device."""
        return replace(self, device=torch.device(device))

    def take(self, positions: Tensor) -> Self:
        """Some of the images."""
        at = positions.cpu()
        return replace(self, positions=self._among_items(at), labels=self.labels[at])

    def hold_out(self, share: float = 0.1, *, seed: int = 0) -> tuple[Self, Self]:
        """(the rest, the held-out share), drawn within every class, the same for the same seed."""
        rest, held = held_out(self.labels, len(self.classes), share, seed)
        return self.take(rest), self.take(held)

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of every channel, of values in [0, 1]; from at most 2,000 spread images."""
        some = torch.linspace(0, len(self) - 1, min(len(self), SAMPLE), dtype=torch.float64).round().long()
        return channel_statistics(images[0] for images, _ in self.to("cpu").batches(divided(some, 64)))

    def batches(
        self, order: Sequence[Tensor], *, crops: Crops | None = None, full: bool = True
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(images [V, B, 3, size, size], labels [B]) for every tensor of positions in ``order``.

        V is 1 without crops. The crops of an image depend on their seed and on its place among the items,
        not on workers or batches. Without ``full`` nothing stands in for damaged images, as counting wants.
        """
        pillow()  # else it would be missed in the workers
        positions = [at.cpu() for at in order]
        work = Work(self.items, self.size, self.ratio, crops)
        sent = run(
            work,
            [self._among_items(at).tolist() for at in positions],
            workers=self.workers,
            prefetch=self.prefetch,
            pinned=self.device.type == "cuda",
        )
        for at, (images, stand_ins, damaged) in zip(positions, sent, strict=True):
            for position, reason in damaged:
                self.damage.note(self.items.name(position), reason)
            if len(at) and not stand_ins:
                names = ", ".join(self.items.name(position) for position, _ in damaged[:5])
                raise DsnetError(f"none of the {len(at)} images of a batch can be read: {names}")
            if not full:
                stand_ins = [place for place, shown in enumerate(stand_ins) if place == shown]
                images = images[:, stand_ins]
            labels = self.labels[at[stand_ins]]
            yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)

    def epoch(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of (images, labels): shuffled and of equal size with a generator, else all in order."""
        for images, labels in self.batches(
            epoch_order(len(self), batch_size, generator), full=generator is not None
        ):
            yield images[0], labels

    def _among_items(self, at: Tensor) -> Tensor:
        if len(at) and not 0 <= int(at.min()) <= int(at.max()) < len(self):
            span = f"{int(at.min())} to {int(at.max())}"
            raise DsnetError(f"{self.name} has {len(self)} images; there are no positions {span}")
        return at if self.positions is None else self.positions[at]
