"""Options that `create_model` takes, as frozen values that check themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsnet.errors import DsnetError, shorten
from dsnet.gate import HeadForm
from dsnet.models.blocks import ACTIVATIONS

__all__ = ["ConvOptions", "GateOptions", "ViTOptions", "check_count"]


def _check(name: str, value: str, possible: tuple[str, ...]) -> None:
    if value not in possible:
        raise DsnetError(f"{name}={shorten(value)} is not possible; choose from {', '.join(possible)}")


def check_count(name: str, value: int) -> None:
    """Raises where an option that counts something is no positive integer, or absurdly large."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**24:
        raise DsnetError(f"{name} must be a positive integer, not {shorten(value)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOptions:
    """The gate's ablations of the paper; the defaults are its final design."""

    gate_head: Literal["onehot", "scalar"] = "onehot"  # scalar: one number in [0, 1] instead of scores
    gate_first_layer: Literal["shared", "separate"] = "shared"  # separate: routing has a layer of its own
    num_classes: int | None = None  # None: the model's default
    in_channels: int = 3

    def __post_init__(self) -> None:
        _check("gate_head", self.gate_head, ("onehot", "scalar"))
        _check("gate_first_layer", self.gate_first_layer, ("shared", "separate"))
        if self.num_classes is not None:
            check_count("num_classes", self.num_classes)
        check_count("in_channels", self.in_channels)

    @property
    def head_form(self) -> HeadForm:
        """How routing heads are made."""
        return HeadForm(kind=self.gate_head, separate=self.gate_first_layer == "separate")


@dataclass(frozen=True, slots=True, kw_only=True)
class ViTOptions(GateOptions):
    """Options of the transformer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvOptions(GateOptions):
    """Options of the convolutional families."""

    norm: Literal["batch", "group"] = "batch"
    activation: Literal["silu", "relu", "hard_swish"] | None = None  # None: the family's own
    bn_key: Literal["stage", "prefix"] = "prefix"  # of several gates: every history apart, or the last choice

    def __post_init__(self) -> None:
        GateOptions.__post_init__(self)
        _check("norm", self.norm, ("batch", "group"))
        _check("bn_key", self.bn_key, ("stage", "prefix"))
        if self.activation is not None:
            _check("activation", self.activation, tuple(ACTIVATIONS))
