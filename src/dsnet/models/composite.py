"""Networks with several members: one supernet at several image sizes, or a cascade of separate networks.

A `CompositeNetwork` takes images of one size and resizes them on the device for the member that runs. Its
routes are all routes of its members, cheapest first, each with its image size. To everything else it is a
supernet with at most one gate, whose choices are the numbers of its routes:

    images ─┬─ resize ─ smallest size: prefix ─ gate ─┬─ segment ─ logits      the choice has this size
            │                                         │
            └─ resize ─ another size: prefix ─ gate ──┴─ segment ─ logits      it has another one

The gate looks at the images at the smallest size (a thumbnail). A network of several gates, and separate
networks, have no such gate: cascades route them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from dsnet.counts import Cost, Shape
from dsnet.errors import DsnetError, shorten
from dsnet.gate import Gate, GateEncoding, HeadForm, SingleRouteGate
from dsnet.models.blocks import Step
from dsnet.models.counting import route_cost, segment_costs
from dsnet.models.features import Features
from dsnet.models.group_by_route import Decide, greedy
from dsnet.models.heads import Head
from dsnet.models.members import History, Member, MemberRouting, MemberStates
from dsnet.models.supernet import GateState, ModelSpec, Supernet
from dsnet.routes import Route, RouteSpace
from dsnet.slicing import Mode, SplitBatchNorm2d

__all__ = [
    "CompositeNetwork",
    "check_image_sizes",
    "take_image_sizes",
    "with_image_sizes",
]

MAX_SIZES = 16


class CompositeNetwork(MemberRouting[Supernet], Supernet):  # type: ignore[misc]
    """Supernets that share weights at several image sizes, or separate networks, as one supernet.

    `create_model` with ``image_sizes`` makes the first kind, `dsnet.cascade` the second.

    Args:
        networks: The networks that hold the weights.
        members: The members, which are these networks or views of them.
        spec: Name and options that `create_model` builds it from.
        gate: The number of the member whose gate decides between all routes; None: there is no gate.

    Examples:
        >>> import dsnet
        >>> model = dsnet.create_model("ds_mbnet_tiny", image_sizes=(8, 16))
        >>> len(model.space), model.space.smallest.image_size, model.space.largest.image_size
        (8, 8, 16)
        >>> model(torch.zeros(2, 3, 16, 16), model.space.smallest).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        networks: Iterable[Supernet],
        members: Sequence[Member[Supernet]],
        *,
        spec: ModelSpec,
        gate: int | None,
    ) -> None:
        nn.Module.__init__(self)
        self.networks = nn.ModuleList(networks)
        self.members: tuple[Member[Supernet], ...] = tuple(members)
        self.spec, self.bn_key = spec, "prefix"
        self.gate_member = gate
        self.locations = self._by_cost()
        size = max(member.image_size for member in members)
        largest = self.members[self.locations[-1][0]].network
        self.input_spec = replace(largest.input_spec, image_size=size, stride=size, smallest=size, fixed=True)
        self._space = RouteSpace(
            name=spec.name,
            routes=tuple(
                Route(
                    space=spec.name,
                    number=number,
                    choices=(number,),
                    stages=route.stages,
                    image_size=self.members[member].image_size,
                )
                for number, (member, route) in enumerate(self.locations)
            ),
        )
        self.slice_table = (tuple(route.stages for route in self._space),)
        self._norms = tuple(m for m in self.modules() if isinstance(m, SplitBatchNorm2d))
        self._no_gate = SingleRouteGate()
        if gate is not None:
            self.gate(0).replace_routing(tuple(range(len(self._space))))
        self.train(self.networks[0].training)

    def _by_cost(self) -> tuple[tuple[int, Route], ...]:
        """Return the routes of all members, as (member, its route), cheapest first."""
        routes = [(number, route) for number, m in enumerate(self.members) for route in m.network.space]

        def cost(item: tuple[int, Route]) -> tuple[int, int]:
            network = self.members[item[0]].network
            routing = item[0] == self.gate_member
            counted = route_cost(network, item[1].choices, network.input_spec.shape(), routing=routing)
            return counted.madds(), item[0]

        return tuple(sorted(routes, key=cost))

    # --- structure ---------------------------------------------------------------------------------
    @property
    def image_sizes(self) -> tuple[int, ...]:
        """The image sizes of the members, rising, each once."""
        return tuple(sorted({member.image_size for member in self.members}))

    @property
    def shares_weights(self) -> bool:
        """Whether the members are one network at several sizes."""
        return len(self.networks) == 1

    @property
    def drops_everywhere(self) -> bool:  # type: ignore[override]  # a constant of families
        """Whether stochastic depth and dropout apply to all routes."""
        return any(member.network.drops_everywhere for member in self.members)

    @property
    def head(self) -> Head:  # type: ignore[override]  # of the most expensive route
        """The classifier of the most expensive route."""
        return self.members[self.locations[-1][0]].network.head

    @property
    def gates(self) -> tuple[Gate, ...]:  # type: ignore[override]  # registered by the networks
        """The gate, or a placeholder with one choice."""
        return (self.gate(0),)

    def gate(self, stage: int) -> Gate:
        """Return the gate that looks at the images at the smallest size."""
        if stage != 0:
            raise DsnetError(f"{self.name} has one gate, number 0; there is no gate {stage}")
        if self.gate_member is None:
            return self._no_gate
        return self.members[self.gate_member].network.gate(0)

    @property
    def choices(self) -> tuple[int, ...]:
        """Number of routes, of which the gate takes one."""
        return (len(self._space),)

    @property
    def segments(self) -> tuple[History, ...]:
        """One for each route."""
        return tuple(route.choices for route in self._space)

    @property
    def merges(self) -> bool:
        """False: a segment is one route."""
        return False

    def at(self, route: Route | int) -> tuple[Supernet, Route]:
        """Return the member that runs a route, and its number of the route."""
        member, local = self.locations[self.space.resolve(route).number]
        return self.members[member].network, local

    def member_of(self, route: Route | int) -> int:
        """Return the number of the member that runs a route."""
        return self.locations[self.space.resolve(route).number][0]

    def prefix_steps(self) -> list[Step]:
        """Raise: the prefix depends on the image size."""
        raise DsnetError(f"{self.name} has a prefix for each image size; see `CompositeNetwork.members`")

    def segment_steps(self, choices: History) -> list[Step]:
        """Raise: the members have the segments."""
        raise DsnetError(f"{self.name} has segments for each image size; see `CompositeNetwork.members`")

    def chain(self, choices: History) -> tuple[Step, ...]:
        """Raise: the members have the segments."""
        return tuple(self.segment_steps(choices))

    def norms(self, choices: History) -> Iterator[tuple[SplitBatchNorm2d, int]]:
        """Yield each split batch norm of a route, with the key it uses."""
        if choices:
            network, local = self.at(choices[0])
            yield from network.norms(local.choices)

    def train(self, mode: bool = True) -> Self:
        """Set training mode, or eval mode, of all members."""
        super().train(mode)
        for member in self.members:  # views are not registered as submodules
            member.network.training = mode
        return self

    def reset_routing(
        self,
        space: RouteSpace | None = None,
        *,
        form: HeadForm | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Give the gate a new, untrained routing head; see `Supernet.reset_routing`."""
        self.require_gate()
        super().reset_routing(space, form=form, generator=generator)

    def gate_encoding(self, state: MemberStates) -> GateEncoding:  # type: ignore[override]
        """Return the input of the gate's routing head, for which the smallest size's prefix runs."""
        self.require_gate()
        assert self.gate_member is not None
        at_gate: GateState = self.states_of(state, self.gate_member, state.mode)[()]
        return at_gate.encoding

    def require_gate(self) -> None:
        """Raise unless the gate of a member can decide between the routes."""
        if self.gate_member is None:
            reason = "several gates" if self.shares_weights else "separate networks"
            raise DsnetError(
                f"{self.name} with {reason} and image sizes {shorten(self.image_sizes)} has no gate that "
                "decides between its routes: give a route, or calibrate a cascade (`dsnet calibrate`)"
            )

    # --- running -----------------------------------------------------------------------------------
    def forward(self, x: Tensor, route: Route | int | None = None, *, mode: Mode | None = None) -> Tensor:
        """Compute logits [B, classes] of images at the largest size; see `Supernet.forward`."""
        if route is None:
            self.require_gate()
        return super().forward(x, route, mode=mode)

    def route(self, x: Tensor, decide: Decide = greedy) -> Tensor:
        """Let the gate decide for images; see `Supernet.route`."""
        self.require_gate()
        return super().route(x, decide)

    def check_images(self, x: Tensor) -> None:
        """Raise unless ``x`` are images of the largest size, on this network's device, in its precision."""
        Supernet.check_images(self, x)

    def run_stages(
        self, x: Tensor, route: Route | int, mode: Mode | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute logits and the features of each stage; see `Supernet.run_stages`."""
        self.check_images(x)
        member, local = self.locations[self.space.resolve(route).number]
        return self.members[member].network.run_stages(self.members[member].images(x), local, mode)

    def features(  # type: ignore[override]
        self,
        x: Tensor,
        route: Route | int | None = None,
        *,
        mode: Mode | None = None,
        decide: Decide = greedy,
    ) -> Features | list[Features]:
        """Compute feature maps by stride, at the image size of the route; see `Supernet.features`."""
        self.check_images(x)
        if route is not None:
            member, local = self.locations[self.space.resolve(route).number]
            images = self.members[member].images(x)
            features = self.members[member].network.features(images, local, mode=mode)
            return features._replace(route=self.space.resolve(route))
        choices = self.route(x, decide)[:, 0]
        results = []
        for number in sorted(set(choices.tolist())):
            indices = (choices == number).nonzero()[:, 0]
            results.append(cast(Features, self.features(x[indices], number))._replace(indices=indices))
        return results

    def feature_shapes(
        self, route: Route | int, image_size: int | tuple[int, int] | None = None
    ) -> dict[int, Shape]:
        """Compute the shapes of a route's feature maps by stride, at its image size."""
        self.input_spec.shape(image_size)
        network, local = self.at(route)
        return network.feature_shapes(local)

    def run_segment(self, state: Any, choices: History, mode: Mode | None = None) -> Any:  # noqa: ANN401
        """Raise: behind the only decision there are logits."""
        raise DsnetError(f"{self.name} decides once: use run_last_segment")

    def segment_output(self, x: Tensor, choices: History, mode: Mode | None = None) -> Tensor:
        """Raise: features of one image size do not fit the routes of another."""
        raise DsnetError(f"{self.name} has segments for each image size; see `CompositeNetwork.members`")

    def key(self, choices: History) -> int:
        """Return the norm key of a route."""
        network, local = self.at(choices[0])
        return network.key(local.choices)

    def cost(self, route: Route | int) -> Cost:
        """Count a route alone, at its image size; the routing head where its member has the gate."""
        network, local = self.at(route)
        routing = self.member_of(route) == self.gate_member
        return route_cost(network, local.choices, network.input_spec.shape(), routing=routing)

    def segment_costs(self, route: Route | int) -> dict[tuple[int, ...], Cost]:
        """Count what a route runs: (member, choices made so far) → cost. Routes share equal keys."""
        number = self.member_of(route)
        network, local = self.at(route)
        costs = segment_costs(network, network.input_spec.shape(), routing=number == self.gate_member)
        histories = (local.choices[:gates] for gates in range(len(local.choices) + 1))
        return {(number, *history): costs[history] for history in histories}


# --- one network at several sizes ----------------------------------------------------------------------
def check_image_sizes(sizes: Any) -> tuple[int, ...]:  # noqa: ANN401
    """Return image sizes as a rising tuple, or raise an error that says what is possible."""
    valid = isinstance(sizes, list | tuple) and 0 < len(sizes) <= MAX_SIZES
    if not valid or any(type(size) is not int or not 0 < size <= 2**14 for size in sizes):
        raise DsnetError(
            f"image_sizes are up to {MAX_SIZES} sides in pixels, for example (64, 96, 128), not "
            f"{shorten(sizes)}"
        )
    if list(sizes) != sorted(set(sizes)):
        raise DsnetError(f"image_sizes must rise, each once, for example (64, 96, 128), not {shorten(sizes)}")
    return tuple(sizes)


def take_image_sizes(options: dict[str, Any], *, has_image_size: bool) -> tuple[int, ...] | None:
    """Take ``image_sizes`` out of the options of a model.

    Args:
        options: The options; one that is built for a single ``image_size`` gets the largest.
        has_image_size: Whether the model has an option ``image_size``.
    """
    given = options.pop("image_sizes", None)
    if given is None:
        return None
    sizes = check_image_sizes(given)
    if has_image_size:
        largest = options.setdefault("image_size", sizes[-1])
        if largest != sizes[-1]:
            raise DsnetError(
                f"image_size={shorten(largest)} must be the largest of image_sizes={sizes}; leave it out"
            )
    return sizes


@torch.no_grad()
def with_image_sizes(network: Supernet, sizes: Sequence[int]) -> CompositeNetwork:
    """Make a supernet run at several image sizes; its weights are shared by all of them.

    Each size has norm statistics of its own: one key in the prefix, one for each route behind it. All start
    as those of the network, which are exact at the largest size only.

    Args:
        network: The supernet; the result takes over its weights.
        sizes: Sides of the images, rising.

    Returns:
        A supernet with all pairs of a size and a route of the network as its routes, cheapest first.

    Raises:
        DsnetError: The network does not run at one of the sizes.

    Examples:
        >>> import dsnet
        >>> model = with_image_sizes(dsnet.create_model("ds_mbnet_tiny"), (8, 16))
        >>> [route.image_size for route in model.space]
        [8, 8, 8, 16, 16, 8, 16, 16]
    """
    sizes = check_image_sizes(sizes)
    if isinstance(network, CompositeNetwork):
        raise DsnetError(f"{network.name} has image sizes already: {shorten(network.image_sizes)}")
    fixed = network.input_spec
    if fixed.fixed and sizes != (fixed.image_size,):
        raise DsnetError(
            f"{network.name} runs at {fixed.image_size} × {fixed.image_size} pixels only and cannot have the "
            f"image sizes {shorten(sizes)}. So do networks with positions, and networks converted for a size "
            "that is not a multiple of their stride (mostly 32): the largest of image_sizes"
        )
    for size in sizes:
        network.input_spec.check(size, size)
    for module in network.modules():
        if isinstance(module, SplitBatchNorm2d):
            module.repeat_keys(len(sizes))
    members = []
    for position, size in enumerate(sizes):
        view = copy.copy(network)
        view.key_set = position
        view.input_spec = replace(network.input_spec, image_size=size)
        view.seal()
        members.append(Member(view))
    spec = ModelSpec(
        name=network.spec.name,
        options=tuple(sorted({**dict(network.spec.options), "image_sizes": sizes}.items())),
    )
    single = len(network.gates) == 1 and not isinstance(network.gate(0), SingleRouteGate)
    return CompositeNetwork([network], members, spec=spec, gate=0 if single else None)
