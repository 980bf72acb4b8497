"""Training schemes, named as in the paper: who learns from whom.

A scheme is composed from parts joined by ``+``:

``label``   every network learns from the labels
``id``      the others learn from the largest network's output (in-place distillation)
``ib``      the others learn from the largest network of the moving average (in-place bootstrapping)
``e-ib``    as ``ib``; the smallest learns from the mean of the average's sampled networks (ensemble IB)
``h-ib``    as ``ib`` (or ``e-ib``), half of it replaced by the features of the last stage (hierarchical IB)
``ed``      every network learns half from the labels, half from an external teacher
``mvco``    every network sees a view of its own (multi-view consistency)

With ``id+label`` and ``ib+label`` the largest network learns from the labels alone, the others half from the
labels (cross-entropy with the true label, smoothed where smoothing is set) and half from their teacher: with
``ib`` from its probabilities, with ``id`` from its decision as a hard label. The paper says of ID + label:
"hard label from the largest sub-network and the ground truth label". ``id`` alone keeps the probabilities.

``single`` trains one uniformly drawn route a step instead of the sandwich of largest, random and smallest
networks.

>>> Scheme.parse("h-ib + mvco").target
'ib'
>>> Scheme.parse("id + label").hard
True
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from dsnet.errors import DsnetError, shorten
from dsnet.routes import Route, RouteSpace

__all__ = ["PARTS", "Scheme"]

PARTS = ("label", "id", "ib", "e-ib", "h-ib", "ed", "mvco", "single")
Target = Literal["id", "ib", "e-ib"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Who learns from whom in a step of Stage I."""

    target: Target | None = None  # whose output the networks below the largest learn from
    label_share: float = 1.0  # how much of their loss comes from the labels
    hard: bool = False  # for id: the others learn the largest's decision, not its probabilities
    hierarchical: bool = False  # half of the loss without labels from features
    external: Literal["hard", "soft"] | None = None  # how an external teacher's output is used
    own_views: bool = False
    sandwich: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.label_share <= 1:
            raise DsnetError(f"label_share must lie between 0 and 1, not {self.label_share}")
        if self.target is None and self.external is None and self.label_share != 1:
            raise DsnetError("without a target every network learns from the labels alone: label_share = 1")
        if self.hierarchical and self.target not in ("ib", "e-ib"):
            raise DsnetError("h-ib needs the moving average of ib or e-ib as its target")
        if self.hard and self.target != "id":
            raise DsnetError(f"hard is for id, whose target is the largest network, not for {self.target}")
        if self.external is not None and self.target is not None:
            raise DsnetError(f"ed and {self.target} cannot be combined: one teacher at a time")
        if not self.sandwich and (self.target is not None or self.external is not None):
            raise DsnetError(
                "single goes with label only: there is no largest network in a step to learn from"
            )

    @classmethod
    def parse(cls, text: str, *, external: Literal["hard", "soft"] = "hard") -> Scheme:
        """The scheme of a name such as ``"ib"``, ``"e-ib+h-ib"`` or ``"ed+mvco"``."""
        parts = [part.strip() for part in text.lower().split("+")]
        unknown = [part for part in parts if part not in PARTS]
        if unknown or len(set(parts)) < len(parts):
            what = (
                f"no scheme has a part {shorten(unknown[0])}"
                if unknown
                else f"{shorten(text)} names a part twice"
            )
            raise DsnetError(f"{what}; possible parts: {', '.join(PARTS)}, joined by +")
        targets = [part for part in ("id", "ib", "e-ib") if part in parts]
        if len(targets) > 1:
            raise DsnetError(f"{' and '.join(targets)} cannot be combined: one teacher at a time")
        hierarchical = "h-ib" in parts
        target: Target | None = "ib" if hierarchical else None
        for known in ("id", "ib", "e-ib"):
            if known in targets:
                target = known
        share = 1.0 if target is None else 0.5 if "label" in parts else 0.0
        return cls(
            target=target,
            label_share=0.5 if "ed" in parts else share,
            hard=target == "id" and "label" in parts,
            hierarchical=hierarchical,
            external=external if "ed" in parts else None,
            own_views="mvco" in parts,
            sandwich="single" not in parts,
        )

    @property
    def uses_average(self) -> bool:
        """Whether a moving average of the weights is needed."""
        return self.target in ("ib", "e-ib")

    def draw(
        self, space: RouteSpace, random: int, generator: torch.Generator | None = None
    ) -> tuple[Route, ...]:
        """The networks of a step: largest, ``random`` drawn from the interior, smallest; or just one."""
        if not self.sandwich:
            return space.sample(1, generator=generator)
        return (space.largest, *space.sample(random, generator=generator, interior=True), space.smallest)

    def networks(self, space: RouteSpace, random: int) -> int:
        """How many networks `draw` gives."""
        return 2 + random * (len(space) > 2) if self.sandwich else 1

    def views(self, networks: int) -> int:
        """How many views of the images a step needs for so many networks."""
        return networks + (self.external is not None) if self.own_views else 1
