"""Members: networks that each run at one image size, and how their routes are run together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Literal, NamedTuple, Protocol, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.errors import DsnetError
from dsnet.models.input_spec import InputSpec
from dsnet.routes import Route
from dsnet.slicing import Mode

__all__ = ["History", "Interpolation", "Member", "MemberNetwork", "MemberRouting", "MemberStates", "resize"]

History = tuple[int, ...]


Interpolation = Literal["bilinear", "bicubic"]


def resize(images: Tensor, size: int, interpolation: Interpolation = "bilinear") -> Tensor:
    """Resize images [B, C, H, W] to a square of ``size`` pixels a side, with antialiasing.

    Examples:
        >>> resize(torch.ones(2, 3, 32, 32), 24).shape
        torch.Size([2, 3, 24, 24])
    """
    if images.shape[2:] == (size, size):
        return images
    x = images.float() if images.device.type == "cpu" and images.itemsize < 4 else images  # it lacks them
    resized = F.interpolate(x, (size, size), mode=interpolation, antialias=True, align_corners=False)
    return resized.to(images)


N = TypeVar("N", bound="MemberNetwork")


class MemberNetwork(Protocol):
    """What routing needs of a member: a `Supernet`, or a network compiled by `dsnet.runtime`."""

    @property
    def input_spec(self) -> InputSpec:
        """The images that the network takes."""

    def run_prefix(self, x: Tensor, mode: Mode | None = None) -> Any:  # noqa: ANN401  (a RoutableState)
        """Run the prefix and the first gate."""

    def gate_scores(self, state: Any) -> Tensor:  # noqa: ANN401
        """Compute the scores of the gate that ``state`` is at."""

    def run_from_states(self, states: Any, choices: History, mode: Mode | None = None) -> Tensor:  # noqa: ANN401
        """Run a route from the last of its gates that ``states`` holds."""

    def run_route(self, x: Tensor, route: Route, mode: Mode | None = None) -> Tensor:
        """Compute the logits of all images at one route."""


class Member(NamedTuple, Generic[N]):
    """A network that runs at one image size.

    Attributes:
        network: The network; its images have ``network.input_spec.image_size`` pixels a side.
        scale: Factor [C, 1, 1] and ``shift`` turn normalised images of the whole network into those that
            this member expects (None: the same).
        shift: See ``scale``.
        interpolation: How images are resized for it.
    """

    network: N
    scale: Tensor | None = None
    shift: Tensor | None = None
    interpolation: Interpolation = "bilinear"

    @property
    def image_size(self) -> int:
        """Side of its images."""
        return self.network.input_spec.image_size

    def images(self, images: Tensor) -> Tensor:
        """Resize and normalise images of the whole network for this member."""
        x = resize(images, self.image_size, self.interpolation)
        if self.scale is None or self.shift is None:
            return x
        return torch.addcmul(self.shift.to(x), x, self.scale.to(x))


class MemberStates:
    """Images of a pass, and their states at the gates of the members that have run.

    Members add their states when they first run, so that routes of one member share its prefix.

    Args:
        images: Images [B, C, H, W] of the whole network.
        mode: How prefixes run in front of the gate.
        states: For each member by number: states by the choices made so far.
    """

    __slots__ = ("images", "mode", "states")

    def __init__(
        self,
        images: Tensor,
        mode: Mode | None = None,
        states: dict[int, dict[History, Any]] | None = None,
    ) -> None:
        self.images, self.mode = images, mode
        self.states: dict[int, dict[History, Any]] = {} if states is None else states

    def take(self, index: Tensor) -> Self:
        """Select images by index [n]."""
        states = {m: {h: s.take(index) for h, s in by.items()} for m, by in self.states.items()}
        return type(self)(self.images[index], self.mode, states)

    def narrow(self, start: int, stop: int) -> Self:
        """Select a range of images, without a copy."""
        states = {m: {h: s.narrow(start, stop) for h, s in by.items()} for m, by in self.states.items()}
        return type(self)(self.images[start:stop], self.mode, states)

    @classmethod
    def join(cls, states: Sequence[Self]) -> Self:
        """Concatenate images; members run again where they are needed."""
        return cls(torch.cat([state.images for state in states]), states[0].mode)


class MemberRouting(Generic[N]):
    """Runs routes of several members; the passes that supernets and compiled networks have in common.

    Attributes:
        members: The members; None where a compiled network does not hold any route of one.
        locations: For each route by number: its member, and the member's own route.
        gate_member: The member whose gate decides between all routes; None: there is no gate.
    """

    members: tuple[Member[N] | None, ...]
    locations: tuple[tuple[int, Route], ...]
    gate_member: int | None
    name: str

    def member(self, number: int) -> Member[N]:
        """Return a member.

        Raises:
            DsnetError: It was not compiled.
        """
        member = self.members[number]
        if member is None:
            raise DsnetError(f"this plan of {self.name} holds no route of member {number}")
        return member

    @property
    def has_gate(self) -> bool:
        """Whether a gate can decide between the routes."""
        return self.gate_member is not None

    def run_prefix(self, x: Tensor, mode: Mode | None = None) -> MemberStates:
        """Take images; members run when a route or the gate needs them."""
        self.check_images(x)
        return MemberStates(x, mode)

    def check_images(self, x: Tensor) -> None:
        """Raise unless ``x`` are images that this network takes."""
        raise NotImplementedError

    def states_of(self, state: MemberStates, member: int, mode: Mode | None) -> dict[History, Any]:
        """Return the states of a member, whose prefix runs if it has not."""
        if member not in state.states:
            images = self.member(member).images(state.images)
            state.states[member] = {(): self.member(member).network.run_prefix(images, mode)}
        return state.states[member]

    def gate_scores(self, state: MemberStates) -> Tensor:
        """Compute the scores [B, routes] of the gate; without one, zeros [B, 1]."""
        if self.gate_member is None:
            return state.images.new_zeros(len(state.images), 1)
        states = self.states_of(state, self.gate_member, state.mode)
        return self.member(self.gate_member).network.gate_scores(states[()])

    def run_last_segment(self, state: MemberStates, choices: History, mode: Mode | None = None) -> Tensor:
        """Run a route on images, from the last of its gates that its member has reached."""
        member, local = self.locations[choices[0]]
        states = self.states_of(state, member, mode)
        return self.member(member).network.run_from_states(states, local.choices, mode)

    def run_from_states(
        self, states: dict[History, MemberStates], choices: History, mode: Mode | None = None
    ) -> Tensor:
        """Run a route on the images in ``states``; see `Supernet.run_from_states`."""
        return self.run_last_segment(states[()], choices, mode)

    def run_route(self, x: Tensor, route: Route, mode: Mode | None = None) -> Tensor:
        """Compute logits at a route that is known to be in the space of this network."""
        self.check_images(x)
        number, local = self.locations[route.number]
        member = self.member(number)
        return member.network.run_route(member.images(x), local, mode)
