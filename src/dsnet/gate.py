"""The double-headed gate: soft attention on channels and a hard decision on the route (section 3.5).

An average pool and one shared layer encode the features; on them sit the attention head, which scales
the channels by 1 + tanh, and, where the gate decides, a routing head. Attention belongs to the
supernet's weights, the routing head to the router: a pass at a given route never runs the latter.
A gate that decides computes in float32 or better, whatever the precision around it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dsnet.counts import Cost, Shape
from dsnet.errors import DsnetError, shorten
from dsnet.slicing import functional as SF
from dsnet.slicing.linear import SlicedLinear
from dsnet.slicing.static import traced

__all__ = [
    "GateEncoding",
    "DecidingGate",
    "Gate",
    "HeadForm",
    "OpenDecidingGate",
    "OpenGate",
    "RoutingHead",
    "attention_width",
    "is_attention",
    "scalar_scores",
]

HeadKind = Literal["onehot", "scalar"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadForm:
    """How a routing head is made.

    The paper's ablations: ``separate`` gives it a first layer of its own on the pooled features, as wide as
    the shared one or ``width``; ``kind="scalar"`` makes it predict one number in [0, 1] instead of scores.
    """

    kind: HeadKind = "onehot"
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
    """Width of a gate's hidden layer for the widest input it gets."""
    return max(channels // 4, 16 if routing else 4)


def scalar_scores(s: Tensor, routes: int) -> Tensor:
    """Scores [B, routes] whose largest is the even cut of [0, 1] that ``s`` [B, 1] lies in."""
    t = torch.arange(routes, device=s.device, dtype=s.dtype)
    return -((s * routes - t - 0.5) ** 2)


class GateEncoding(NamedTuple):
    """What a routing head reads, in float32 or better: pooled features and the shared hidden layer."""

    pooled: Tensor  # [B, C]
    hidden: Tensor  # [B, hidden]


class RoutingHead(nn.Module):
    """Scores for every choice that a gate has.

    ``choices`` are numbers of the full space (for several gates: of the gate's own choices), so a head
    trained for a narrowed space still speaks of the same routes.
    """

    def __init__(
        self,
        channels: int,
        hidden: int,
        choices: tuple[int, ...],
        form: HeadForm = HeadForm(),  # noqa: B008  (a frozen value)
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not choices or not all(type(c) is int and c >= 0 for c in choices):
            raise DsnetError(f"a routing head needs the numbers of its choices, not {shorten(choices)}")
        self.form = form
        self.choices = choices
        hidden = form.width or hidden
        self.first = SlicedLinear(channels, hidden, device=device, dtype=dtype) if form.separate else None
        outputs = len(choices) if form.kind == "onehot" else 1
        self.last = SlicedLinear(hidden, outputs, init_std=0.01, device=device, dtype=dtype)

    def forward(self, encoding: GateEncoding, *, batch_invariant: bool = False) -> Tensor:
        """Scores [B, choices]; see `Gate.forward`."""
        linear = functools.partial(_precise_linear, by_row=batch_invariant)
        hidden = encoding.hidden if self.first is None else F.relu(linear(self.first, encoding.pooled))
        scores = linear(self.last, hidden)
        return scalar_scores(scores.sigmoid(), len(self.choices)) if self.form.kind == "scalar" else scores

    def get_extra_state(self) -> Tensor:
        """The choices, for the state dict: the same weights mean nothing for other ones."""
        return torch.tensor(self.choices, dtype=torch.long, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Takes the choices from a state dict."""
        if len(state) == len(self.choices):  # else the weights do not fit either, which torch reports
            self.choices = tuple(state.tolist())

    def cost(self, channels: int) -> Cost:
        """The last layer as routing; a first layer of its own counts as any other layer."""
        last = Cost(routing=self.last.in_features * self.last.out_features)
        return last if self.first is None else last + Cost(layers=channels * self.first.out_features)


class Gate(nn.Module):
    """Attention on up to ``channels`` channels and, where ``choices`` are given, a routing head."""

    def __init__(
        self,
        channels: int,
        *,
        choices: tuple[int, ...] | None = None,
        form: HeadForm = HeadForm(),  # noqa: B008  (a frozen value)
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden = attention_width(channels, routing=choices is not None)
        self.first = SlicedLinear(channels, hidden, init_std=(2 / hidden) ** 0.5, device=device, dtype=dtype)
        self.attention = SlicedLinear(hidden, channels, init_std=0.0, device=device, dtype=dtype)
        self.routing = (
            None
            if choices is None
            else RoutingHead(channels, hidden, choices, form, device=device, dtype=dtype)
        )

    def forward(self, x: Tensor, *, batch_invariant: bool = False) -> tuple[Tensor, GateEncoding]:
        """Scales ``x`` [B, C, H, W] by its attention; also gives what a routing head would read.

        ``batch_invariant``: on a CPU no image's numbers depend on the others of the batch, not in the last
        bit either, so that neither do decisions.
        """
        by_row = batch_invariant and x.dtype in (torch.float32, torch.float64)
        if self.routing is None and not by_row:  # decides nothing: the precision around it will do
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
        """Puts a new, untrained routing head in place of the old one: for these choices, of the old form."""
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
    def choices(self) -> tuple[int, ...]:
        """What the routing head decides between, in the order of its scores; nothing without a head."""
        return () if self.routing is None else self.routing.choices

    @property
    def form(self) -> HeadForm:
        """How the routing head is made; the default without one."""
        return HeadForm() if self.routing is None else self.routing.form

    def score(self, encoding: GateEncoding, *, batch_invariant: bool = False) -> Tensor:
        """The routing head's scores [B, choices] in float32 or better."""
        return cast(Tensor, self._routing()(encoding, batch_invariant=batch_invariant))

    def cost(self, shape: Shape) -> Cost:
        """Cost on an input of this shape, which it leaves as it is."""
        channels, hidden = shape.channels, self.first.out_features
        layers = self.first.cost(channels, hidden) + self.attention.cost(hidden, channels)
        cost = layers + Cost(pools=channels * shape.area)
        return cost if self.routing is None else cost + self.routing.cost(channels)

    def extract(self, channels: int) -> nn.Module:
        """The stand-alone attention of this width; the routing head stays behind."""
        hidden = self.first.out_features
        return traced(
            _ChannelAttention(self.first.extract(channels, hidden), self.attention.extract(hidden, channels))
        )

    def extract_deciding(self, channels: int) -> nn.Module:
        """The stand-alone gate of this width, routing head included: features → (scaled features, scores)."""
        hidden, routing = self.first.out_features, self._routing()
        return DecidingGate(
            self.first.extract(channels, hidden),
            self.attention.extract(hidden, channels),
            routing.last.extract(routing.last.in_features, routing.last.out_features),
            None if routing.first is None else routing.first.extract(channels, routing.first.out_features),
            routes=len(routing.choices) if routing.form.kind == "scalar" else None,
        )


class OpenGate(Gate):
    """A gate where there is nothing to decide: one choice, and features pass as they are."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.routing = None

    def forward(self, x: Tensor, *, batch_invariant: bool = False) -> tuple[Tensor, GateEncoding]:
        """Nothing is scaled, nothing read."""
        nothing = x.new_empty(len(x), 0)
        return x, GateEncoding(nothing, nothing)

    def replace_routing(
        self,
        choices: tuple[int, ...],
        generator: torch.Generator | None = None,
        *,
        form: HeadForm | None = None,
    ) -> None:
        """There is one choice, and no head."""
        if choices != (0,):
            raise DsnetError(f"a network of one route has nothing to decide: choices (0,), not {choices}")

    @property
    def choices(self) -> tuple[int, ...]:
        """The only one."""
        return (0,)

    @property
    def form(self) -> HeadForm:
        """Of no head."""
        return HeadForm()

    def score(self, encoding: GateEncoding, *, batch_invariant: bool = False) -> Tensor:
        """Of one choice [B, 1]."""
        return encoding.pooled.new_zeros(len(encoding.pooled), 1)

    def cost(self, shape: Shape) -> Cost:
        """None."""
        return Cost()

    def extract(self, channels: int) -> nn.Module:
        """Nothing."""
        return nn.Identity()

    def extract_deciding(self, channels: int) -> nn.Module:
        """Features as they are, and scores of one choice."""
        return OpenDecidingGate()


class OpenDecidingGate(nn.Module):
    """The gate of a network of one route, for plans: features as they are, and one score."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Images [B, C, H, W]."""
        return x, x.new_zeros(len(x), 1, dtype=torch.float32)


class DecidingGate(nn.Module):
    """A gate of torch's own layers that scales and scores; in float32 or better, whatever comes in."""

    def __init__(
        self,
        first: nn.Linear,
        attention: nn.Linear,
        last: nn.Linear,
        separate: nn.Linear | None,
        *,
        routes: int | None,
    ) -> None:
        super().__init__()
        self.first, self.attention, self.last, self.separate = first, attention, last, separate
        self.routes = routes  # of a scalar head

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, C, H, W] → the same scaled, and scores [B, choices]."""
        scores, by = self.decide(x.mean((2, 3), dtype=self.first.weight.dtype))
        return x * (1 + torch.tanh(by)).to(x.dtype)[:, :, None, None], scores

    def decide(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """Means over positions [B, C] → scores [B, choices], and what scales channels, as 1 + tanh of it."""
        hidden = self.run(self.first, pooled, "relu")
        encoding = hidden if self.separate is None else self.run(self.separate, pooled, "relu")
        scores = self.run(self.last, encoding)
        if self.routes is not None:
            scores = scalar_scores(scores.sigmoid(), self.routes)
        return scores, self.run(self.attention, hidden)

    def run(self, layer: nn.Linear, x: Tensor, act: Literal["none", "relu"] = "none") -> Tensor:
        """A layer and its activation."""
        y: Tensor = layer(x)
        return F.relu(y) if act == "relu" else y


def _precise_linear(
    layer: SlicedLinear, x: Tensor, out: int | None = None, *, by_row: bool = False
) -> Tensor:
    """Runs in the precision of ``x``, whatever the weights' own or an autocast around it.

    ``by_row``: on a CPU every row is summed by itself.
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


class _ChannelAttention(nn.Module):
    def __init__(self, first: nn.Linear, attention: nn.Linear) -> None:
        super().__init__()
        self.pool, self.flatten = nn.AdaptiveAvgPool2d(1), nn.Flatten()
        self.first, self.act, self.attention = first, nn.ReLU(), attention

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + torch.tanh(self.attention(self.act(self.first(self.flatten(self.pool(x))))))
        return x * scale.unsqueeze(-1).unsqueeze(-1)


def is_attention(module: nn.Module) -> bool:
    """Whether it is what `Gate.extract` gives: linear layers ``first`` and ``attention`` scale channels."""
    return type(module).__name__ == _ChannelAttention.__name__ and isinstance(module, fx.GraphModule)
