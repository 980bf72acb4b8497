"""Compiled networks of several members, e.g. one for each image size, and their executor.

Images come at the size of the whole network; each member resizes those that it runs, on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from dsnet.core.process_bound import InProcess
from dsnet.errors import DsnetError
from dsnet.models.group_by_route import greedy
from dsnet.models.input_spec import InputSpec
from dsnet.models.members import Member, MemberRouting
from dsnet.models.supernet import ModelSpec
from dsnet.routes import Route, RouteSpace
from dsnet.routing.cost_table import CostPenalties
from dsnet.routing.policies import RoutedOutput, margin, penalised_decision, unsure
from dsnet.runtime.executors.base import Executor, GateChoices
from dsnet.runtime.executors.host import CompiledNetwork, Memory
from dsnet.runtime.executors.segment_calls import SegmentCalls, calls_of_members
from dsnet.runtime.partition.segments import SegmentKey

__all__ = ["AnyCompiled", "CompiledComposite", "CompositeExecutor"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledComposite(MemberRouting[CompiledNetwork], InProcess):
    """The compiled members of a `CompositeNetwork`. It is routed and planned as a `CompiledNetwork` is.

    Attributes:
        spec: How the network is created.
        space: All routes of the network.
        gates: The choices of its gate.
        options: The compiled choices of the gate.
        input_spec: The images that the network takes.
        members: The compiled members; None where no route of one is compiled.
        locations: For each route: its member, and the member's own route.
        gate_member: The member with the gate; None: there is none.
    """

    spec: ModelSpec
    space: RouteSpace
    gates: tuple[GateChoices, ...]
    options: tuple[tuple[int, ...], ...]
    input_spec: InputSpec
    members: tuple[Member[CompiledNetwork] | None, ...]
    locations: tuple[tuple[int, Route], ...]
    gate_member: int | None
    training: bool = field(default=False, init=False)
    merges: bool = field(default=False, init=False)
    fallback: None = field(default=None, init=False)

    @property
    def networks(self) -> list[CompiledNetwork]:
        """The compiled networks of all members that are compiled."""
        return [member.network for member in self.members if member is not None]

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the network."""
        return self.spec.name

    @property
    def executor(self) -> CompositeExecutor:
        """Return the executor that runs batches by those of the members."""
        return CompositeExecutor(self)

    @property
    def choices(self) -> tuple[int, ...]:
        """Number of routes, of which the gate takes one."""
        return (len(self.space),)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Shape of an image."""
        size = self.input_spec.image_size
        return (self.input_spec.channels, size, size)

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images."""
        return (self.input_spec.image_size,) * 2

    @property
    def device(self) -> torch.device:
        """The device that all members run on."""
        return self.networks[0].device

    @property
    def precision(self) -> torch.dtype:
        """The precision of features and outputs."""
        return self.networks[0].precision

    @property
    def takes(self) -> torch.dtype:
        """The precision to which images are converted."""
        return self.networks[0].takes

    @property
    def backend(self) -> str:
        """The name of the backend."""
        return self.networks[0].backend

    @property
    def memory(self) -> Memory:
        """Whether weights are packed copies or shared with the network."""
        return self.networks[0].memory

    @property
    def classes(self) -> int:
        """The number of outputs per image."""
        return self.networks[0].classes

    @property
    def resident(self) -> int:
        """Bytes of the weights of all members."""
        return sum(network.resident for network in self.networks)

    @property
    def num_programs(self) -> int:
        """The number of programs that were compiled or captured."""
        return sum(network.num_programs for network in self.networks)

    @property
    def batch_invariant(self) -> bool:
        """Whether scores of an image are bitwise the same in every batch."""
        return all(network.batch_invariant for network in self.networks)

    def gate(self, stage: int) -> GateChoices:
        """Return the choices of the gate."""
        return self.gates[stage]

    def check_images(self, x: Tensor) -> None:
        """Raise unless ``x`` are images that this plan takes, in the process that compiled it."""
        self.networks[0].check_images_of(x, self.name, self.image_shape)

    def shared_network(self) -> str | None:
        """Return the name of the network whose weights it shares, if it does."""
        return self.name if self.memory == "shared" else None

    def holds(self, route: Route) -> bool:
        """Return whether a route is compiled."""
        number, local = self.locations[route.number]
        member = self.members[number]
        return member is not None and member.network.holds(local)

    def run_segment(self, state: object, choices: SegmentKey, mode: object = None) -> None:
        """Raise: behind the only decision there are logits."""
        raise DsnetError(f"{self.name} decides once: use run_last_segment")


AnyCompiled: TypeAlias = CompiledNetwork | CompiledComposite


class CompositeExecutor:
    """Run the images of each member by the member's own executor.

    A cascade hands the routes of one member to that member together, so that they share its prefix. The gate
    looks at the images at the smallest size; images that stay at this size go on from its features.
    """

    def __init__(self, network: CompiledComposite) -> None:
        self.network = network

    @property
    def executors(self) -> list[Executor]:
        """The executors of the members."""
        return [network.executor for network in self.network.networks]

    @property
    def max_batch(self) -> int:
        """The number of images that are best run together."""
        return max(executor.max_batch for executor in self.executors)

    @property
    def asynchronous(self) -> bool:
        """False: the host decides which member runs next."""
        return False

    @property
    def num_programs(self) -> int:
        """The number of programs that were compiled or captured."""
        return self.network.num_programs

    def run_route(self, x: Tensor, route: Route) -> Tensor:
        """Run all images at one route and return their logits."""
        number, local = self.network.locations[route.number]
        member = self.network.member(number)
        return member.network.executor.run_route(member.images(x), local)

    def run_gate(self, x: Tensor, penalties: CostPenalties | None = None) -> RoutedOutput:
        """Run images at the routes that the gate decides for, scores less ``penalties``."""
        network, decide = self.network, greedy if penalties is None else penalised_decision(penalties)
        if network.gate_member is None:
            raise DsnetError(f"{network.name} has no gate: give a route, or a router (a cascade)")
        state = network.run_prefix(x)
        positions = decide(network.gate_scores(state), 0, None)
        choices = torch.tensor(network.gate(0).choices, device=x.device)[positions]
        output = self._empty(x)
        (gated,) = state.states[network.gate_member].values()
        for route in sorted(set(choices.tolist())):
            number, local = network.locations[route]
            if number == network.gate_member:
                rows = (choices == route).nonzero()[:, 0]
                logits = network.member(number).network.run_last_segment(gated.take(rows), local.choices)
                output.logits[rows], output.routes[rows] = logits.to(output.logits), route
        elsewhere = [
            choice
            for choice in network.gate(0).choices
            if network.locations[choice][0] != network.gate_member
        ]
        return self._run_groups(x, choices, elsewhere, output)

    def run_assigned(self, x: Tensor, choices: Tensor, *, within_gates: bool = False) -> RoutedOutput:
        """Run each image at its own route, ``choices`` [B, 1]."""
        routes = [route.number for route in self.network.space if self.network.holds(route)]
        return self._run_groups(x, choices[:, 0], routes, self._empty(x))

    def _empty(self, x: Tensor) -> RoutedOutput:
        logits = x.new_empty(len(x), self.network.classes, dtype=self.network.precision)
        return RoutedOutput(logits, torch.full((len(x),), -1, dtype=torch.long, device=x.device))

    def _run_groups(
        self, x: Tensor, choices: Tensor, routes: Sequence[int], output: RoutedOutput
    ) -> RoutedOutput:
        """Run the images whose choice is one of ``routes``, each member's together, into ``output``."""
        by_member: dict[int, list[int]] = {}
        for route in routes:
            by_member.setdefault(self.network.locations[route][0], []).append(route)
        for number, own in by_member.items():
            rows = torch.isin(choices, torch.tensor(own, device=choices.device)).nonzero()[:, 0]
            if len(rows):
                member, taken = self.network.member(number), choices[rows].tolist()
                locals_ = torch.tensor(
                    [self.network.locations[route][1].choices for route in taken], device=x.device
                )
                result = member.network.executor.run_assigned(member.images(x[rows]), locals_)
                output.logits[rows], output.routes[rows] = result.logits.to(output.logits), choices[rows]
        missing = choices[output.routes < 0]
        if len(missing):
            raise DsnetError(f"this plan of {self.network.name} does not hold route {int(missing[0])}")
        return output

    def run_cascade(self, x: Tensor, routes: Sequence[int], thresholds: Sequence[float]) -> RoutedOutput:
        """Run ``routes`` one after the other, each for the images whose margin is below the threshold."""
        logits, numbers = self._empty(x)
        rows = torch.arange(len(x), device=x.device)
        start = 0
        while start < len(routes) and (start == 0 or len(rows)):
            number = self.network.locations[routes[start]][0]
            stop = start + 1
            while stop < len(routes) and self.network.locations[routes[stop]][0] == number:
                stop += 1
            member = self.network.member(number)
            part = x if len(rows) == len(x) else x[rows]
            output = self._run_member(member, part, routes[start:stop], thresholds[start : stop - 1])
            logits = output.logits if len(rows) == len(x) else logits.index_copy(0, rows, output.logits)
            numbers = output.routes if len(rows) == len(x) else numbers.index_copy(0, rows, output.routes)
            if stop < len(routes):
                last = output.routes == routes[stop - 1]
                rows = rows[last & unsure(margin(output.logits), thresholds[stop - 1])]
            start = stop
        return RoutedOutput(logits, numbers)

    def _run_member(
        self,
        member: Member[CompiledNetwork],
        x: Tensor,
        routes: Sequence[int],
        thresholds: Sequence[float],
    ) -> RoutedOutput:
        """Run routes of one member as a cascade; the result has the numbers of the whole network."""
        images, executor = member.images(x), member.network.executor
        own = [self.network.locations[route][1] for route in routes]
        if len(own) == 1:
            numbers = torch.full((len(x),), routes[0], dtype=torch.long, device=x.device)
            return RoutedOutput(executor.run_route(images, own[0]), numbers)
        output = executor.run_cascade(images, [route.number for route in own], thresholds)
        table = torch.zeros(len(member.network.space), dtype=torch.long, device=x.device)
        table[[route.number for route in own]] = torch.tensor(routes, device=x.device)
        return RoutedOutput(output.logits, table[output.routes])

    def segment_calls(self, x: Tensor) -> SegmentCalls:
        """Return functions that run a member's prefix, or a whole route, on all images of ``x``."""
        network = self.network
        prefixes = []
        for member in network.members:
            if member is None:
                raise DsnetError(
                    "a profile needs all routes of the network: compile with routes of all members"
                )
            prefix = member.network.executor.segment_calls(member.images(x)).calls[()]
            prefixes.append(functools.partial(_resized, member, x, prefix))
        routes: dict[SegmentKey, Callable[[], object]] = {
            route.choices: functools.partial(self.run_route, x, route) for route in network.space
        }
        members = [network.locations[route.number][0] for route in network.space]
        return calls_of_members(routes, prefixes, members, network.has_gate)


def _resized(member: Member[CompiledNetwork], x: Tensor, prefix: Callable[[], object]) -> None:
    member.images(x)
    prefix()
