"""The settings of Stage II."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dsnet.core.ranges import check_range
from dsnet.errors import DsnetError

if TYPE_CHECKING:  # `dsnet gate --help` shows these settings without importing torch
    from dsnet.gate import HeadForm
    from dsnet.models import Supernet
    from dsnet.routes import RouteSpace

__all__ = ["GateConfig", "LossWeights"]


class LossWeights(NamedTuple):
    """Weights of Stage II's losses: label, complexity penalty, sandwich gate sparsification."""

    target: float = 1.0
    complexity: float = 0.5
    sgs: float = 1.0

    def __str__(self) -> str:
        return ", ".join(f"{name}={value:g}" for name, value in self._asdict().items())


def _setting(default: Any, about: str) -> Any:  # noqa: ANN401  (of any type)
    """Return a field with a description for `dsnet gate --help`."""
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """Stage II; the defaults are the paper's."""

    space: str | None = _setting(None, "candidates: S, M, L or route numbers as 0,3,7 (default: all routes)")
    goal: Literal["paper", "value"] = _setting("paper", "value: the chance that a route is right (one gate)")
    target: float | None = _setting(None, "λ1, weight of the label loss (default: the space's, or 1)")
    complexity: float | None = _setting(None, "λ2, weight of the cost penalty (default: the space's, or 0.5)")
    sgs: float | None = _setting(None, "λ3, weight of gate sparsification (default: the space's, or 1)")
    strategy: Literal["try_best", "give_up"] = _setting("try_best", "give_up: unsolved images go to route 0")
    even: bool = _setting(False, "weight SGS targets so that rare ones count as much as frequent ones")
    head: Literal["onehot", "scalar"] = _setting("onehot", "scalar: one number in [0, 1] instead of scores")
    first_layer: Literal["shared", "separate"] = _setting("shared", "separate: a layer of the head's own")
    width: int | None = _setting(None, "width of the separate layer (default: that of the shared one)")
    images: Literal["train", "held_out"] = _setting("train", "held_out: half of the held-out images")
    augment: bool = _setting(True, "augment images as Stage I did")
    passes: int | None = _setting(None, "cached passes over the images; 0: none (default: as many as fit)")
    lr: float = _setting(0.05, "learning rate")
    momentum: float = _setting(0.9, "Nesterov momentum of SGD")
    decay: float = _setting(0.9, "factor of the learning rate after each epoch")
    epochs: int = _setting(10, "passes over the images")
    batch: int | None = _setting(None, "images in a step (default: 512, less for small sets)")
    start: str | None = _setting(None, "run whose routing heads are the initial ones (gate transfer)")
    latency: str | None = _setting(None, "table of `dsnet profile`, whose milliseconds are the costs")
    seed: int = _setting(0, "seed of heads, order, views and noise")
    timeout_minutes: float = _setting(5.0, "time after which other processes count as lost")

    def __post_init__(self) -> None:
        check_range(self, *LossWeights._fields, least=0, below=float("inf"))
        if self.target == self.complexity == self.sgs == 0:
            raise DsnetError("target, complexity, sgs are all 0: there is nothing to learn from")
        check_range(self, "epochs", "batch", least=1)
        check_range(self, "passes", "seed", least=0)
        check_range(self, "timeout_minutes", above=0, below=1e6)
        check_range(self, "lr", above=0, below=float("inf"))
        check_range(self, "momentum", least=0, below=1)
        check_range(self, "decay", above=0, most=1)
        _ = self.form

    @property
    def form(self) -> HeadForm:
        """The form of the routing heads."""
        from dsnet.gate import HeadForm

        return HeadForm(kind=self.head, separate=self.first_layer == "separate", width=self.width)

    def routes(self, model: Supernet) -> RouteSpace:
        """Return the routes that the gates decide between.

        Raises:
            DsnetError: The network has no gate, or no such routes.
        """
        model.require_gate()
        if self.space is None:
            return model.space
        numbers = [part.strip() for part in self.space.split(",")]
        if all(number.isdecimal() for number in numbers):
            return model.space.narrow([int(number) for number in numbers])
        return model.space.narrow(self.space)

    def weights(self, model: Supernet) -> LossWeights:
        """Return the loss weights: those set here, else those of the space, else the paper's defaults."""
        defaults = LossWeights(*model.gate_weights.get(self.space or "", LossWeights()))
        given = {name: getattr(self, name) for name in LossWeights._fields}
        return defaults._replace(**{name: weight for name, weight in given.items() if weight is not None})

    def resolved(self, model: Supernet) -> GateConfig:
        """Return these settings with the loss weights of a network's space filled in."""
        self.routes(model)  # raises where the network has no such space
        return replace(self, **self.weights(model)._asdict())

    def chosen(self, model: Supernet) -> str:
        """Describe what the gates decide between and learn from."""
        routes, every = len(self.routes(model)), len(model.space)
        text = "" if self.space is None else f"space {self.space}: "
        text += f"all {routes} routes" if routes == every else f"{routes} of {every} routes"
        if self.goal == "value":
            return f"{text}, goal=value"
        text += f", loss weights {self.weights(model)}"
        by_space = [name for name in LossWeights._fields if getattr(self, name) is None]
        known = by_space and self.space in model.gate_weights
        return f"{text} ({', '.join(by_space)} by the space)" if known else text
