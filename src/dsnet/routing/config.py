"""Everything that decides how gates are trained, as one frozen value that checks itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from dsnet.errors import DsnetError
from dsnet.gate import HeadForm
from dsnet.models import Supernet
from dsnet.routes import RouteSpace

__all__ = ["GateConfig"]


def _setting(default: Any, about: str) -> Any:  # noqa: ANN401  (of any type)
    """A field that says what it is, for `dsnet gate --help`."""
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """Stage II; the defaults are the paper's."""

    space: str | None = _setting(None, "routes to decide between: S, M, L, or numbers as 0,3,7; none: all")
    goal: Literal["paper", "value"] = _setting(
        "paper", "value: the chance that each route is right (one gate)"
    )
    target: float = _setting(1.0, "λ1, weight of the label's loss")
    complexity: float = _setting(0.5, "λ2, weight of the complexity penalty")
    sgs: float = _setting(1.0, "λ3, weight of sandwich gate sparsification")
    strategy: Literal["try_best", "give_up"] = _setting(
        "try_best", "where images go that no route solves: last route, or first (give_up)"
    )
    even: bool = _setting(False, "SGS targets weighted so that rare ones count as much as frequent ones")
    head: Literal["onehot", "scalar"] = _setting("onehot", "scalar: one number in [0, 1] instead of scores")
    first_layer: Literal["shared", "separate"] = _setting("shared", "separate: a layer of the head's own")
    width: int | None = _setting(None, "of that layer; none: as wide as the shared one")
    images: Literal["train", "held_out"] = _setting(
        "train", "held_out: half of the images that Stage I did not see"
    )
    augment: bool = _setting(True, "images as Stage I saw them; false: as they are")
    passes: int | None = _setting(
        None, "over the images, kept in memory; 0: none; none: as it fits (one gate)"
    )
    lr: float = _setting(0.05, "learning rate")
    momentum: float = _setting(0.9, "of SGD, Nesterov's")
    decay: float = _setting(0.9, "of the learning rate, an epoch")
    epochs: int = _setting(10, "over the images")
    batch: int | None = _setting(None, "none: 512, or what makes 20 steps of a small set")
    start: str | None = _setting(None, "the folder of a run: its routing heads to begin with (gate transfer)")
    latency: str | None = _setting(None, "a table of `dsnet profile`: the penalty counts its milliseconds")
    seed: int = _setting(0, "of heads, order, views and noise")

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
