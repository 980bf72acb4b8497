"""Everything that decides how gates are trained, as one frozen value that checks itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsnet.errors import DsnetError
from dsnet.gate import HeadForm
from dsnet.models import Supernet
from dsnet.routes import RouteSpace
from dsnet.routing.losses import Strategy

__all__ = ["GateConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """Stage II; the defaults are the paper's."""

    space: str | None = None  # routes to decide between: S, M, L, or numbers as 0,3,7; none: all
    goal: Literal["paper", "value"] = "paper"  # value: the chance that each route is right (one gate)
    target: float = 1.0  # λ1, weight of the label's loss
    complexity: float = 0.5  # λ2, weight of the complexity penalty
    sgs: float = 1.0  # λ3, weight of sandwich gate sparsification
    strategy: Strategy = "try_best"  # where images go that no route solves: last route, or first (give_up)
    even: bool = False  # SGS targets weighted so that rare ones count as much as frequent ones
    head: Literal["onehot", "scalar"] = "onehot"  # scalar: one number in [0, 1] instead of scores
    first_layer: Literal["shared", "separate"] = "shared"  # separate: a layer of the head's own
    width: int | None = None  # of that layer; none: as wide as the shared one
    images: Literal["train", "held_out"] = "train"  # held_out: half of the images that Stage I did not see
    augment: bool = True  # images as Stage I saw them; false: as they are
    passes: int | None = None  # over the images, kept in memory; 0: none; none: as it fits (one gate)
    lr: float = 0.05
    momentum: float = 0.9
    decay: float = 0.9  # of the learning rate, an epoch
    epochs: int = 10
    batch: int | None = None  # none: 512, or what makes 20 steps of a small set
    latency: str | None = None  # a table of `dsnet profile`: the penalty counts its milliseconds
    seed: int = 0

    def __post_init__(self) -> None:
        weights = ("target", "complexity", "sgs")
        for name in weights:
            if not 0 <= getattr(self, name) < float("inf"):
                raise DsnetError(f"{name} must be at least 0, not {getattr(self, name)}")
        if not any(getattr(self, name) for name in weights):
            raise DsnetError(f"{', '.join(weights)} are all 0: there is nothing to learn from")
        for name, least in (("epochs", 1), ("batch", 1), ("passes", 0), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise DsnetError(f"{name} must be at least {least}, not {value}")
        if not 0 < self.lr < float("inf") or not 0 <= self.momentum < 1 or not 0 < self.decay <= 1:
            raise DsnetError(
                f"lr must be above 0, momentum in [0, 1), decay in (0, 1], not {self.lr}, {self.momentum}, "
                f"{self.decay}"
            )
        _ = self.form

    @property
    def form(self) -> HeadForm:
        """How the routing heads are made."""
        return HeadForm(kind=self.head, separate=self.first_layer == "separate", width=self.width)

    def routes(self, model: Supernet) -> RouteSpace:
        """What the gates decide between."""
        if self.space is None:
            return model.space
        numbers = [part.strip() for part in self.space.split(",")]
        if all(number.isdecimal() for number in numbers):
            return model.space.narrow([int(number) for number in numbers])
        return model.space.narrow(self.space)
