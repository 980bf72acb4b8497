"""Options of `create_model`, as frozen dataclasses that check themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsnet.errors import DsnetError, shorten
from dsnet.gate import HeadForm
from dsnet.models.conv_blocks import ACTIVATIONS, ConvSpec
from dsnet.slicing import Factory

__all__ = ["ConvOptions", "GateOptions", "check_count"]


def _check(name: str, value: str, possible: tuple[str, ...]) -> None:
    if value not in possible:
        raise DsnetError(f"{name}={shorten(value)} is not possible; choose from {', '.join(possible)}")


def check_count(name: str, value: int) -> None:
    """Raise unless an option is a positive integer of a reasonable size."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**24:
        raise DsnetError(f"{name} must be a positive integer, not {shorten(value)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOptions:
    """Options of every supernet. The gate's defaults are the paper's final design, the others its ablations.

    Attributes:
        gate_head: ``onehot`` predicts a score for each choice, ``scalar`` one number in [0, 1].
        gate_first_layer: ``shared`` with the attention, or ``separate`` for the routing head.
        num_classes: Number of classes (default: that of the model).
        in_channels: Number of channels of the images.

    Raises:
        DsnetError: A value is not possible.
    """

    gate_head: Literal["onehot", "scalar"] = "onehot"
    gate_first_layer: Literal["shared", "separate"] = "shared"
    num_classes: int | None = None
    in_channels: int = 3

    def __post_init__(self) -> None:
        _check("gate_head", self.gate_head, ("onehot", "scalar"))
        _check("gate_first_layer", self.gate_first_layer, ("shared", "separate"))
        if self.num_classes is not None:
            check_count("num_classes", self.num_classes)
        check_count("in_channels", self.in_channels)

    def head_form(self) -> HeadForm:
        """Return the form of the routing heads."""
        return HeadForm(kind=self.gate_head, separate=self.gate_first_layer == "separate")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvOptions(GateOptions):
    """Options of the convolutional families.

    Attributes:
        norm: Split batch norm or group norm.
        activation: Name of the activation (default: that of the family).
        bn_key: With several gates, keep norm statistics for each history of choices (``prefix``), or for
            each choice of the stage's own gate (``stage``).

    Examples:
        >>> ConvOptions(norm="group", num_classes=10).conv_spec({}, channels_per_group=8).norm
        'group'
    """

    norm: Literal["batch", "group"] = "batch"
    activation: Literal["silu", "relu", "hard_swish"] | None = None
    bn_key: Literal["stage", "prefix"] = "prefix"

    def __post_init__(self) -> None:
        GateOptions.__post_init__(self)
        _check("norm", self.norm, ("batch", "group"))
        _check("bn_key", self.bn_key, ("stage", "prefix"))
        if self.activation is not None:
            _check("activation", self.activation, tuple(ACTIVATIONS))

    def conv_spec(
        self, factory: Factory, *, activation: str = "relu", channels_per_group: int = 16
    ) -> ConvSpec:
        """Return the settings that all convolutional layers share.

        Args:
            factory: Device and precision of the parameters.
            activation: Activation of the family, where no option is given.
            channels_per_group: Width of the groups, for the option ``norm="group"``.
        """
        return ConvSpec(
            norm=self.norm,
            channels_per_group=channels_per_group,
            activation=self.activation or activation,
            factory=factory,
        )
