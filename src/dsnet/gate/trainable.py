"""Gates of a supernet, which run with a slice of their channels."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsnet.counts import Cost, Shape
from dsnet.errors import DsnetError, shorten
from dsnet.gate.inference import (
    InferenceGate,
    RoutingInferenceGate,
    SingleRouteInferenceGate,
    channel_attention,
    scalar_scores,
)
from dsnet.slicing import functional as SF
from dsnet.slicing.linear import SlicedLinear
from dsnet.slicing.parameters import Factory

__all__ = [
    "Gate",
    "GateEncoding",
    "HeadForm",
    "RoutingGate",
    "RoutingHead",
    "SingleRouteGate",
    "attention_width",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadForm:
    """The form of a routing head: the paper's final design by default, or one of its ablations.

    Attributes:
        kind: ``onehot`` predicts a score for each choice, ``scalar`` one number in [0, 1].
        separate: Give the head a first layer of its own on the pooled features.
        width: Width of that layer (default: that of the shared one).

    Examples:
        >>> HeadForm(separate=True, width=128)
        HeadForm(kind='onehot', separate=True, width=128)
    """

    kind: Literal["onehot", "scalar"] = "onehot"
    separate: bool = False
    width: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("onehot", "scalar"):
            raise DsnetError(f"unknown routing head {shorten(self.kind)}; possible: onehot, scalar")
        if self.width is not None and (not self.separate or self.width < 1):
            raise DsnetError(
                f"width={self.width} needs a first layer of the head's own (separate) and at least 1"
            )


def attention_width(channels: int, *, routing: bool) -> int:
    """Return the width of a gate's hidden layer for an input of ``channels`` channels at full width.

    Examples:
        >>> attention_width(96, routing=True), attention_width(8, routing=False)
        (24, 4)
    """
    return max(channels // 4, 16 if routing else 4)


class GateEncoding(NamedTuple):
    """The input of a routing head: pooled features and the shared hidden layer, in float32 or better."""

    pooled: Tensor  # [B, C]
    hidden: Tensor  # [B, hidden]

    def select(self, index: Tensor | slice) -> GateEncoding:
        """Select images."""
        return GateEncoding(self.pooled[index], self.hidden[index])

    @classmethod
    def cat(cls, encodings: Iterable[GateEncoding]) -> GateEncoding:
        """Concatenate the images of several encodings."""
        return cls(*(torch.cat(parts) for parts in zip(*encodings, strict=True)))


class RoutingHead(nn.Module):
    """Scores for each choice of a gate.

    Args:
        channels: Channels of the pooled features at full width.
        hidden: Width of the shared hidden layer.
        choices: Numbers of the choices in the full space. A head that is trained for a narrowed space thus
            refers to the same routes.
        form: Form of the head.
        **factory: ``device`` and ``dtype``.
    """

    def __init__(
        self,
        channels: int,
        hidden: int,
        choices: tuple[int, ...],
        form: HeadForm = HeadForm(),  # noqa: B008  (a frozen value)
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        if not choices or not all(type(c) is int and c >= 0 for c in choices):
            raise DsnetError(f"a routing head needs the numbers of its choices, not {shorten(choices)}")
        self.form = form
        self.choices = choices
        hidden = form.width or hidden
        self.first = SlicedLinear(channels, hidden, **factory) if form.separate else None
        outputs = len(choices) if form.kind == "onehot" else 1
        self.last = SlicedLinear(hidden, outputs, init_std=0.01, **factory)

    def forward(self, encoding: GateEncoding, *, batch_invariant: bool = False) -> Tensor:
        """Compute scores [B, choices]; see `Gate.forward`."""
        linear = functools.partial(_precise_linear, by_row=batch_invariant)
        hidden = encoding.hidden if self.first is None else F.relu(linear(self.first, encoding.pooled))
        scores = linear(self.last, hidden)
        return scalar_scores(scores.sigmoid(), len(self.choices)) if self.form.kind == "scalar" else scores

    def get_extra_state(self) -> Tensor:
        """Store the choices in the state dict: the weights have a meaning for these choices only."""
        return torch.tensor(self.choices, dtype=torch.long, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Load the choices from a state dict."""
        if len(state) == len(self.choices):  # otherwise torch reports that the weights do not fit
            self.choices = tuple(state.tolist())

    def cost(self, channels: int) -> Cost:
        """Count the last layer as routing, and a separate first layer as any other layer."""
        last = Cost(routing=self.last.in_features * self.last.out_features)
        return last if self.first is None else last + Cost(layers=channels * self.first.out_features)


class Gate(nn.Module):
    """Channel attention and, with ``choices``, a routing head on the same features.

    Args:
        channels: Channels of the input at full width.
        choices: Numbers of the choices that the routing head scores; None for attention only.
        form: Form of the routing head.
        **factory: ``device`` and ``dtype``.

    Examples:
        >>> gate = Gate(16, choices=(0, 1, 2))
        >>> scaled, encoding = gate(torch.zeros(2, 16, 4, 4))
        >>> scaled.shape, gate.score(encoding).shape
        (torch.Size([2, 16, 4, 4]), torch.Size([2, 3]))
    """

    def __init__(
        self,
        channels: int,
        *,
        choices: tuple[int, ...] | None = None,
        form: HeadForm = HeadForm(),  # noqa: B008  (a frozen value)
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        hidden = attention_width(channels, routing=choices is not None)
        self.first = SlicedLinear(channels, hidden, init_std=(2 / hidden) ** 0.5, **factory)
        self.attention = SlicedLinear(hidden, channels, init_std=0.0, **factory)
        self.routing = None if choices is None else RoutingHead(channels, hidden, choices, form, **factory)

    def forward(self, x: Tensor, *, batch_invariant: bool = False) -> tuple[Tensor, GateEncoding]:
        """Scale the channels of features, and compute the input of a routing head.

        Args:
            x: Features [B, C, H, W]; C is the slice of the channels.
            batch_invariant: On a CPU, compute each image so that its result has the same bits in any batch.

        Returns:
            Scaled features [B, C, H, W], and the encoding that `score` takes.
        """
        by_row = batch_invariant and x.dtype in (torch.float32, torch.float64)
        if self.routing is None and not by_row:  # no decision depends on the precision
            pooled = x.mean((2, 3))
            hidden = F.relu(self.first(pooled))
            scale = 1 + torch.tanh(self.attention(hidden, x.shape[1]))
        else:
            pooled = x.mean((2, 3), dtype=SF.at_least_float32(x.dtype))
            hidden = F.relu(_precise_linear(self.first, pooled, by_row=by_row))
            scale = 1 + torch.tanh(_precise_linear(self.attention, hidden, x.shape[1], by_row=by_row))
        return x * scale.to(x.dtype)[:, :, None, None], GateEncoding(pooled, hidden)

    def replace_routing(
        self,
        choices: tuple[int, ...],
        generator: torch.Generator | None = None,
        *,
        form: HeadForm | None = None,
    ) -> None:
        """Replace the routing head by an untrained one for ``choices`` (default form: that of the old)."""
        old, weight = self._routing(), self.first.weight
        new = RoutingHead(
            self.first.in_features,
            self.first.out_features,
            choices,
            form or old.form,
            device=weight.device if generator is None else generator.device,
            dtype=weight.dtype,
        )
        for layer in new.modules():
            if isinstance(layer, SlicedLinear):
                layer.reset_parameters(generator)
        self.routing = new.to(weight.device)

    def _routing(self) -> RoutingHead:
        if self.routing is None:
            raise DsnetError("this gate has no routing head: it only scales channels")
        return self.routing

    @property
    def encoding_size(self) -> int:
        """Number of values of an image that a routing head reads."""
        return self.first.in_features + self.first.out_features

    @property
    def choices(self) -> tuple[int, ...]:
        """The choices of the routing head in the order of its scores; empty without a head."""
        return () if self.routing is None else self.routing.choices

    @property
    def form(self) -> HeadForm:
        """The form of the routing head; the default without one."""
        return HeadForm() if self.routing is None else self.routing.form

    def score(self, encoding: GateEncoding, *, batch_invariant: bool = False) -> Tensor:
        """Compute the routing head's scores [B, choices] in float32 or better."""
        return cast(Tensor, self._routing()(encoding, batch_invariant=batch_invariant))

    def cost(self, shape: Shape, *, routing: bool = True) -> Cost:
        """Compute the cost on an input of this shape, with or without the routing head."""
        channels, hidden = shape.channels, self.first.out_features
        layers = self.first.cost(channels, hidden) + self.attention.cost(hidden, channels)
        cost = layers + Cost(pools=channels * shape.area)
        return cost + self.routing.cost(channels) if self.routing is not None and routing else cost

    def extract(self, channels: int) -> nn.Module:
        """Extract the stand-alone attention of this width, without the routing head."""
        hidden = self.first.out_features
        return channel_attention(
            self.first.extract(channels, hidden), self.attention.extract(hidden, channels)
        )

    def extract_with_routing(self, channels: int) -> nn.Module:
        """Extract the stand-alone gate of this width: features → (scaled features, scores)."""
        hidden, routing = self.first.out_features, self._routing()
        return InferenceGate(
            self.first.extract(channels, hidden),
            self.attention.extract(hidden, channels),
            routing.last.extract(routing.last.in_features, routing.last.out_features),
            None if routing.first is None else routing.first.extract(channels, routing.first.out_features),
            routes=len(routing.choices) if routing.form.kind == "scalar" else None,
        )


class RoutingGate(Gate):
    """A gate without channel attention: features pass unchanged, the routing head has its own first layer.

    Args:
        channels: Channels of the input at full width.
        choices: Numbers of the choices that the routing head scores.
        form: Form of the routing head; its first layer is separate in any case.
        **factory: ``device`` and ``dtype``.

    Examples:
        >>> gate = RoutingGate(16, choices=(0, 1))
        >>> x, encoding = gate(torch.zeros(2, 16, 4, 4))
        >>> gate.score(encoding).shape
        torch.Size([2, 2])
    """

    def __init__(
        self,
        channels: int,
        *,
        choices: tuple[int, ...],
        form: HeadForm = HeadForm(),  # noqa: B008  (a frozen value)
        **factory: Unpack[Factory],
    ) -> None:
        nn.Module.__init__(self)
        hidden = attention_width(channels, routing=True)
        self.channels = channels
        self.routing = RoutingHead(channels, hidden, choices, replace(form, separate=True), **factory)

    def forward(self, x: Tensor, *, batch_invariant: bool = False) -> tuple[Tensor, GateEncoding]:
        """Return features [B, C, H, W] as they are, and the encoding that `score` takes."""
        pooled = x.mean((2, 3), dtype=SF.at_least_float32(x.dtype))
        return x, GateEncoding(pooled, pooled.new_empty(len(x), 0))

    def replace_routing(
        self,
        choices: tuple[int, ...],
        generator: torch.Generator | None = None,
        *,
        form: HeadForm | None = None,
    ) -> None:
        """Replace the routing head by an untrained one for ``choices`` (default form: that of the old)."""
        weight = self._routing().last.weight
        device = weight.device if generator is None else generator.device
        form = self.form if form is None else form
        new = RoutingGate(self.channels, choices=choices, form=form, device=device, dtype=weight.dtype)
        for layer in new.modules():
            if isinstance(layer, SlicedLinear):
                layer.reset_parameters(generator)
        self.routing = new._routing().to(weight.device)

    @property
    def encoding_size(self) -> int:
        """Number of values of an image that a routing head reads."""
        return self.channels

    def cost(self, shape: Shape, *, routing: bool = True) -> Cost:
        """Compute the cost on an input of this shape, with or without the routing head."""
        pool = Cost(pools=shape.channels * shape.area)
        return pool + self._routing().cost(shape.channels) if routing else pool

    def extract(self, channels: int) -> nn.Module:
        """Return the identity."""
        return nn.Identity()

    def extract_with_routing(self, channels: int) -> nn.Module:
        """Extract the stand-alone gate: features → (the same features, scores)."""
        first, last = (cast(SlicedLinear, layer) for layer in (self._routing().first, self._routing().last))
        return RoutingInferenceGate(
            first.extract(channels, first.out_features),
            last.extract(last.in_features, last.out_features),
            routes=len(self.choices) if self.form.kind == "scalar" else None,
        )


class SingleRouteGate(Gate):
    """The gate of a network of one route: features pass unchanged, and there is one choice."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.routing = None

    def forward(self, x: Tensor, *, batch_invariant: bool = False) -> tuple[Tensor, GateEncoding]:
        """Return ``x`` and an empty encoding."""
        empty = x.new_empty(len(x), 0)
        return x, GateEncoding(empty, empty)

    def replace_routing(
        self,
        choices: tuple[int, ...],
        generator: torch.Generator | None = None,
        *,
        form: HeadForm | None = None,
    ) -> None:
        """Check that ``choices`` is the only possible one; there is no head to replace."""
        if choices != (0,):
            raise DsnetError(f"a network of one route has nothing to decide: choices (0,), not {choices}")

    @property
    def choices(self) -> tuple[int, ...]:
        """The only choice."""
        return (0,)

    @property
    def encoding_size(self) -> int:
        """None: there is nothing to decide."""
        return 0

    def score(self, encoding: GateEncoding, *, batch_invariant: bool = False) -> Tensor:
        """Return scores [B, 1] of zero."""
        return encoding.pooled.new_zeros(len(encoding.pooled), 1)

    def cost(self, shape: Shape, *, routing: bool = True) -> Cost:
        """Return a cost of zero."""
        return Cost()

    def extract(self, channels: int) -> nn.Module:
        """Return the identity."""
        return nn.Identity()

    def extract_with_routing(self, channels: int) -> nn.Module:
        """Return a stand-alone gate with one choice."""
        return SingleRouteInferenceGate()


def _precise_linear(
    layer: SlicedLinear, x: Tensor, out: int | None = None, *, by_row: bool = False
) -> Tensor:
    """Run a layer in the precision of ``x``, whatever that of its weights or of an autocast.

    ``by_row``: on a CPU, sum each row independently of the others.
    """
    assert layer.bias is not None
    weight: Tensor = layer.weight
    bias: Tensor = layer.bias
    out = weight.shape[0] if out is None else out
    if weight.dtype != x.dtype:
        weight, bias = weight[:out, : x.shape[-1]].to(x.dtype), bias[:out].to(x.dtype)
    if by_row and x.device.type == "cpu":
        return SF.row_linear(x, weight[:out, : x.shape[-1]], bias[:out])
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return SF.linear(x, weight, bias, out)
    return SF.linear(x, weight, bias, out)
