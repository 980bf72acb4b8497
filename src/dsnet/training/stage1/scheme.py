"""Training schemes, named as in the paper: what each network of a step learns from.

A scheme consists of parts joined by ``+``:

``label``   all networks learn from the labels
``id``      the others learn from the largest network's output (in-place distillation)
``ib``      the others learn from the largest network of the moving average (in-place bootstrapping)
``e-ib``    as ``ib``; the smallest learns from the mean of the average's sampled networks (ensemble IB)
``h-ib``    as ``ib`` (or ``e-ib``), half of it replaced by the features of the last stage (hierarchical IB)
``ed``      all networks learn half from the labels, half from an external teacher
``mvco``    each network sees its own view of the images (multi-view consistency)
``single``  one uniformly drawn route per step instead of the sandwich; with ``label`` only

With ``id+label`` and ``ib+label`` the largest network learns from the labels, the others half from the labels
(with label smoothing, if set) and half from their teacher: with ``ib`` from its probabilities, with ``id``
from its decision as a hard label. The paper says of ID + label:
"hard label from the largest sub-network and the ground truth label". ``id`` alone keeps the probabilities.

`register_scheme` adds a part.

>>> Scheme.parse("h-ib + mvco").target
'ib'
>>> Scheme.parse("id + label").hard
True
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from dsnet.errors import DsnetError, shorten
from dsnet.routes import Route, RouteSpace
from dsnet.training.stage1._losses import soft_loss

__all__ = ["Scheme", "register_scheme", "sandwich", "single_route"]

Target = Literal["id", "ib", "e-ib"]
RouteSampler: TypeAlias = Callable[[RouteSpace, int, torch.Generator | None], tuple[Route, ...]]
SoftLoss: TypeAlias = Callable[[Tensor, Tensor, float], Tensor]


def sandwich(space: RouteSpace, random: int, generator: torch.Generator | None = None) -> tuple[Route, ...]:
    """Return the largest route, ``random`` ones drawn from the interior, and the smallest."""
    return (space.largest, *space.sample(random, generator=generator, interior=True), space.smallest)


def single_route(
    space: RouteSpace, random: int, generator: torch.Generator | None = None
) -> tuple[Route, ...]:
    """Return one uniformly drawn route; ``random`` has no effect."""
    return space.sample(1, generator=generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Which networks run in a step of Stage I, and what each of them learns from.

    The first network of a step teaches the others: by its own output (``id``), or by that of the moving
    average at its route (``ib``, ``e-ib``). It learns from the labels alone.

    Args:
        target: The teacher of the other networks; None: there is none.
        label_share: Weight of the labels in a taught network's loss; the teacher has the rest.
        hard: With ``id``, teach the largest network's decision instead of its probabilities.
        hierarchical: Take half of the teacher's weight from features (``h-ib``).
        external: Use an external teacher's decisions (``hard``) or probabilities (``soft``); None: none.
        own_views: Show every network its own view of the images.
        draw: Function of (space, number of random routes, generator) that draws the routes of a step.
        soft_loss: Function of (logits [B, C], teacher's logits [B, C], temperature) that returns the loss of
            a network taught by probabilities.

    Raises:
        DsnetError: These values cannot be combined.
    """

    target: Target | None = None
    label_share: float = 1.0
    hard: bool = False
    hierarchical: bool = False
    external: Literal["hard", "soft"] | None = None
    own_views: bool = False
    draw: RouteSampler = sandwich
    soft_loss: SoftLoss = soft_loss

    def __post_init__(self) -> None:
        taught = self.target is not None or self.external is not None
        if not 0 <= self.label_share <= 1:
            raise DsnetError(f"label_share must lie between 0 and 1, not {self.label_share}")
        if not taught and self.label_share != 1:
            raise DsnetError("label_share must be 1 for a scheme without a teacher")
        if self.hierarchical and self.target not in ("ib", "e-ib"):
            raise DsnetError("h-ib needs the moving average of ib or e-ib as its target")
        if self.hard and self.target != "id":
            raise DsnetError(f"hard is for id, whose target is the largest network, not for {self.target}")
        if self.external is not None and self.target is not None:
            raise DsnetError(f"ed and {self.target} cannot be combined: one teacher at a time")
        if self.draw is single_route and taught:
            raise DsnetError(
                "single goes with label only: there is no largest network in a step to learn from"
            )

    @classmethod
    def parse(cls, text: str, *, external: Literal["hard", "soft"] = "hard") -> Scheme:
        """Return the scheme of a name.

        Args:
            text: Registered parts joined by ``+`` in any order, such as ``"ib"`` or ``"ed+mvco"``.
            external: What an external teacher teaches, if the scheme has one.

        Raises:
            DsnetError: A part is not registered or given twice, or the parts cannot be combined.
        """
        parts = [part.strip() for part in text.lower().split("+")]
        unknown = [part for part in parts if part not in _PARTS]
        if unknown:
            raise DsnetError(
                f"unknown scheme {shorten(unknown[0])}; registered: {', '.join(_PARTS)}, joined by + (a "
                "scheme of your own is registered by the module that defines it: --import MODULE)"
            )
        if len(set(parts)) < len(parts):
            raise DsnetError(f"scheme {shorten(text)} names a part twice")
        scheme = cls()
        for name, apply in _PARTS.items():  # in order of registration: the order in the text has no meaning
            if name in parts:
                scheme = apply(scheme)
        return scheme if scheme.external is None else replace(scheme, external=external)

    @property
    def uses_average(self) -> bool:
        """Whether a moving average of the weights is needed."""
        return self.target in ("ib", "e-ib")

    def terms(self, index: int) -> tuple[tuple[str, float], ...]:
        """Return the name and the weight of each term in the loss of a step's network, by its index."""
        taught_by = "ed" if self.external is not None else self.target if index else None
        if taught_by is None or self.label_share == 1:
            return (("label", 1.0),)
        rest = 1 - self.label_share
        label = (("label", self.label_share),) if self.label_share else ()
        if self.hierarchical:
            return *label, (taught_by, rest / 2), ("h-ib", rest / 2)
        return *label, (taught_by, rest)

    def networks(self, space: RouteSpace, random: int) -> int:
        """Return the number of networks in a step."""
        return len(self.draw(space, random, torch.Generator().manual_seed(0)))

    def views(self, networks: int) -> int:
        """Return the number of views of the images that a step of ``networks`` networks needs."""
        return networks + (self.external is not None) if self.own_views else 1


SchemePart: TypeAlias = Callable[[Scheme], Scheme]
_PARTS: dict[str, SchemePart] = {}


def register_scheme(name: str) -> Callable[[SchemePart], SchemePart]:
    """Register a scheme, or a part to be joined with others by ``+``, under the name that settings use.

    The decorated function gets the scheme made of the other parts (those registered before it) and returns
    the scheme to train with. Alone it gets ``Scheme()``, by which all networks learn from labels.

    Args:
        name: Lower-case letters, digits and ``-``.

    Raises:
        DsnetError: The name is registered already or has other characters.

    Examples:
        >>> @register_scheme("mostly-labels")
        ... def mostly_labels(scheme):
        ...     return replace(scheme, target="ib", label_share=0.75)
        >>> Scheme.parse("mostly-labels+mvco").label_share
        0.75
        >>> del _PARTS["mostly-labels"]
    """

    def register(part: SchemePart) -> SchemePart:
        if name in _PARTS or re.fullmatch("[a-z][a-z0-9-]*", name) is None:
            reason = "registered already" if name in _PARTS else "not a possible name"
            raise DsnetError(f"scheme {shorten(name)} is {reason}; registered: {', '.join(_PARTS)}")
        _PARTS[name] = part
        return part

    return register


def _taught_by(target: Target, scheme: Scheme) -> Scheme:
    if scheme.target is not None:
        raise DsnetError(f"{scheme.target} and {target} cannot be combined: one teacher at a time")
    return replace(scheme, target=target, label_share=0.0)


for _target in get_args(Target):
    register_scheme(_target)(functools.partial(_taught_by, _target))


@register_scheme("h-ib")
def _hierarchical(scheme: Scheme) -> Scheme:
    return replace(scheme, target=scheme.target or "ib", label_share=0.0, hierarchical=True)


@register_scheme("ed")
def _external(scheme: Scheme) -> Scheme:
    return replace(scheme, external="hard", label_share=0.5)


@register_scheme("label")
def _label(scheme: Scheme) -> Scheme:
    return scheme if scheme.target is None else replace(scheme, label_share=0.5, hard=scheme.target == "id")


@register_scheme("mvco")
def _own_views(scheme: Scheme) -> Scheme:
    return replace(scheme, own_views=True)


@register_scheme("single")
def _single(scheme: Scheme) -> Scheme:
    return replace(scheme, draw=single_route)
