"""Routes and route spaces: frozen values that say which slice of a supernet runs.

A `Route` is one sub-network, with the sliced sizes of each dynamic stage. A `RouteSpace` is the ordered set
of a supernet's routes, cheapest first. Routes of a narrowed space keep their numbers of the full space, so
that a number means the same in norm keys, decisions, histograms and files.

>>> space = RouteSpace.of_table("toy", [(Slice(width=8),), (Slice(width=16),), (Slice(width=32),)])
>>> space.smallest.number, space.largest.number, space.narrow([1, 2]).smallest.number
(0, 2, 1)
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

import torch

from dsnet.errors import DsnetError, printable, shorten

__all__ = ["Route", "RouteSpace", "Slice", "evenly_spaced", "small_medium_large"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The sizes of one stage; a size that does not apply to the stage is None.

    Examples:
        >>> print(Slice(width=48, depth=2, kernel=3))
        width=48 depth=2 kernel=3
    """

    width: int  # output channels, or embedding features
    depth: int = 1  # number of blocks of the stage that run
    kernel: int | None = None
    padding: int | None = None  # of the stage's strided convolution; others keep the resolution
    hidden: int | None = None  # channels inside a bottleneck, features inside an MLP
    heads: int | None = None
    head_dim: int | None = None
    groups: tuple[int, ...] | None = None  # widths of the channel groups of a converted network

    def __post_init__(self) -> None:
        if self.groups is not None:
            object.__setattr__(self, "groups", tuple(self.groups))  # a list where it was read from JSON
            if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in self.groups):
                raise DsnetError(f"groups of a slice must be positive integers, not {shorten(self.groups)}")
        for f in fields(self):
            size = getattr(self, f.name)
            if f.name == "groups":
                continue
            minimum = 0 if f.name == "padding" else 1
            if size is None and f.default is None:
                continue
            if isinstance(size, bool) or not isinstance(size, int) or size < minimum:
                raise DsnetError(
                    f"{f.name} of a slice must be an integer of at least {minimum}, not {size!r}"
                )

    def __str__(self) -> str:
        sizes = ((f.name, getattr(self, f.name)) for f in fields(self))
        return " ".join(
            f"{name}={','.join(map(str, size)) if isinstance(size, tuple) else size}"
            for name, size in sizes
            if size is not None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One sub-network of a supernet. Take routes from a `RouteSpace`.

    Examples:
        >>> route = RouteSpace.of_table("toy", [(Slice(width=8),), (Slice(width=16),)]).largest
        >>> print(route)
        route 1 of toy (width=16 depth=1)
        >>> Route.from_dict(route.to_dict()) == route
        True
    """

    space: str  # name of the space it belongs to
    number: int  # position in the full space, cheapest first
    choices: tuple[int, ...]  # of each gate
    stages: tuple[Slice, ...]  # the dynamic stages
    image_size: int | None = None  # side of the images, where routes differ in it

    def __post_init__(self) -> None:
        numbers = (self.number, *self.choices)
        if not self.choices or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
            raise DsnetError(
                f"a route has a number and a choice for every gate, not {self.number!r} and {self.choices!r}"
            )
        if self.image_size is not None and (type(self.image_size) is not int or self.image_size < 1):
            raise DsnetError(f"the image size of a route is a positive integer, not {self.image_size!r}")

    @property
    def label(self) -> str:
        """The number, with the image size where routes differ in it: ``3 (16 px)``."""
        return f"{self.number}" if self.image_size is None else f"{self.number} ({self.image_size} px)"

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types, without the sizes that do not apply to a stage."""
        stages = [{k: v for k, v in asdict(s).items() if v is not None} for s in self.stages]
        data = {"space": self.space, "number": self.number, "choices": list(self.choices), "stages": stages}
        return data if self.image_size is None else {**data, "image_size": self.image_size}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Route:
        """Restore a route from the result of `to_dict`.

        Raises:
            DsnetError: A field is missing, unknown or has an impossible value.
        """
        names = {f.name for f in fields(cls)}
        _check_fields("a route", data, names, names - {"image_size"})
        for stage in data["stages"]:
            _check_fields("a stage of a route", stage, {f.name for f in fields(Slice)}, {"width"})
        return cls(
            space=data["space"],
            number=data["number"],
            choices=tuple(data["choices"]),
            stages=tuple(Slice(**stage) for stage in data["stages"]),
            image_size=data.get("image_size"),
        )

    def __str__(self) -> str:
        size = "" if self.image_size is None else f"{self.image_size} px: "
        return f"route {self.number} of {self.space} ({size}{' | '.join(map(str, self.stages))})"


@dataclass(frozen=True, kw_only=True)
class RouteSpace(Sequence[Route]):
    """The routes of a supernet, cheapest first; a sequence of `Route`.

    Attributes:
        name: Name of the supernet.
        routes: The routes.
        narrowings: Route numbers of the paper's narrowed spaces by name, see `narrow`.

    Examples:
        >>> import dsnet
        >>> space = dsnet.create_model("ds_resnet_tiny", device="meta").space
        >>> len(space), space.gates, space[5].number, space.narrow("S").name
        (16, 2, 5, 'ds_resnet_tiny')
    """

    name: str
    routes: tuple[Route, ...]
    narrowings: tuple[tuple[str, tuple[int, ...]], ...] = field(default=())  # name → route numbers

    def __post_init__(self) -> None:
        if not self.routes:
            raise DsnetError(f"route space {self.name!r} needs at least one route")
        numbers = [route.number for route in self.routes]
        if numbers != sorted(set(numbers)):
            raise DsnetError(f"routes of {self.name!r} must be in order and distinct, not numbered {numbers}")
        foreign = sorted({r.space for r in self.routes} - {self.name})
        if foreign:
            raise DsnetError(f"route space {self.name!r} cannot hold routes of {', '.join(foreign)}")
        if {len(route.choices) for route in self.routes} != {self.gates}:
            raise DsnetError(f"all routes of {self.name!r} must have one choice per gate")
        # Gates decide one by one, so each combination of choices can occur. They are counted before they
        # are enumerated, since a damaged file may have very many.
        combinations = math.prod(map(len, self.choices))
        if combinations != len(self.routes) or sorted(route.choices for route in self.routes) != list(
            itertools.product(*self.choices)
        ):
            raise DsnetError(
                f"routes {numbers} of {self.name!r} are not every combination of the gates' choices "
                f"{[list(c) for c in self.choices]}; gates that decide one by one could leave the space"
            )

    @classmethod
    def of_table(
        cls,
        name: str,
        table: Iterable[tuple[Slice, ...]],
        narrowings: Mapping[str, tuple[int, ...]] | None = None,
    ) -> RouteSpace:
        """Build the space of one gate.

        Args:
            name: Name of the space.
            table: Sizes of the stages of each route, cheapest first.
            narrowings: Route numbers of narrowed spaces by name.
        """
        routes = tuple(Route(space=name, number=i, choices=(i,), stages=row) for i, row in enumerate(table))
        return cls(name=name, routes=routes, narrowings=tuple((narrowings or {}).items()))

    # --- as a sequence -----------------------------------------------------------------------------
    def __len__(self) -> int:
        return len(self.routes)

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401  (a slice gives a tuple, as Sequence has it)
        return self.routes[index]

    def __iter__(self) -> Iterator[Route]:
        return iter(self.routes)

    def __repr__(self) -> str:
        return f"RouteSpace({self.name!r}, {len(self)} routes, {self.gates} gate{'s' * (self.gates != 1)})"

    # --- properties --------------------------------------------------------------------------------
    @property
    def smallest(self) -> Route:
        """The cheapest route of this space."""
        return self.routes[0]

    @property
    def largest(self) -> Route:
        """The most expensive route of this space."""
        return self.routes[-1]

    @property
    def gates(self) -> int:
        """Number of gates, and of choices of a route."""
        return len(self.routes[0].choices)

    @cached_property
    def choices(self) -> tuple[tuple[int, ...], ...]:
        """Possible choices of each gate in this space, in order."""
        return tuple(tuple(sorted(set(column))) for column in zip(*(r.choices for r in self), strict=True))

    @cached_property
    def _by_number(self) -> dict[int, Route]:
        return {route.number: route for route in self.routes}

    @cached_property
    def _by_choices(self) -> dict[tuple[int, ...], Route]:
        return {route.choices: route for route in self.routes}

    # --- lookup ------------------------------------------------------------------------------------
    def resolve(self, route: Route | int) -> Route:
        """Return the route with this number, or check that a route belongs to this space.

        Raises:
            DsnetError: There is no such route.

        Examples:
            >>> space = RouteSpace.of_table("toy", [(Slice(width=8),), (Slice(width=16),)])
            >>> space.resolve(1) is space.largest
            True
        """
        if isinstance(route, Route):
            if route.space != self.name:
                raise DsnetError(f"{route} is not a route of {self.name}; take one from its `space`")
            known = self._by_number.get(route.number)
            if known is None:
                raise DsnetError(f"{route} is not in this space, which has the routes {self._numbers_text()}")
            if known != route:
                raise DsnetError(
                    f"{self.name} has no such route: given {route}, but number {route.number} is {known}"
                )
            return known
        number = _integer(route)
        if number is None:
            raise DsnetError(f"a route is a Route or its number, not {type(route).__name__} {route!r}")
        if number not in self._by_number:
            raise DsnetError(f"{self.name} has no route {number}; possible: {self._numbers_text()}")
        return self._by_number[number]

    def of_choices(self, choices: Sequence[int]) -> Route:
        """Return the route of these choices, one per gate.

        Raises:
            DsnetError: There is no such route.

        Examples:
            >>> import dsnet
            >>> space = dsnet.create_model("ds_resnet_tiny", device="meta").space
            >>> space.of_choices((3, 3)) == space.largest
            True
        """
        key = tuple(map(_integer, choices)) if isinstance(choices, Iterable) else None
        route = self._by_choices.get(key)  # type: ignore[arg-type]  # None where a choice is no integer
        if route is None:
            possible = " × ".join(str(list(c)) for c in self.choices)
            raise DsnetError(f"{self.name} has no route for the choices {choices!r}; possible: {possible}")
        return route

    def _numbers_text(self) -> str:
        numbers = [route.number for route in self.routes]
        if numbers == list(range(numbers[0], numbers[-1] + 1)):
            return f"{numbers[0]} to {numbers[-1]}"
        return ", ".join(map(str, numbers))

    # --- subsets -----------------------------------------------------------------------------------
    def narrow(self, to: str | Iterable[Route | int]) -> RouteSpace:
        """Return the space of some of the routes, which keep their numbers.

        Args:
            to: Name of a narrowed space of the paper ("S", "M", "L", …), or routes or their numbers. With
                several gates, these must be all combinations of the remaining choices.

        Raises:
            DsnetError: There is no such space or route, or combinations are missing.

        Examples:
            >>> rows = [(Slice(width=8),), (Slice(width=16),), (Slice(width=32),)]
            >>> [route.number for route in RouteSpace.of_table("toy", rows).narrow([0, 2])]
            [0, 2]
        """
        if isinstance(to, str):
            named = dict(self.narrowings)
            if to not in named:
                has = f"it has {', '.join(named)}" if named else "it has no named spaces"
                raise DsnetError(
                    f"{self.name} has no space {shorten(to)}; {has}. Or give route numbers "
                    f"({self._numbers_text()}), as 0,3"
                )
            routes = [self.resolve(number) for number in named[to]]
        elif isinstance(to, Route) or not isinstance(to, Iterable):
            raise DsnetError(f"narrow to a name or to several routes, not to {to!r}")
        else:
            routes = sorted({self.resolve(r) for r in to}, key=lambda r: r.number)
            if not routes:
                raise DsnetError(f"narrowing {self!r} to no route at all; name at least one")
        return RouteSpace(name=self.name, routes=tuple(routes))

    def sample(
        self, count: int, *, generator: torch.Generator | None = None, interior: bool = False
    ) -> tuple[Route, ...]:
        """Draw routes uniformly with replacement.

        Args:
            count: Number of routes.
            generator: Source of randomness (default: torch's global one).
            interior: Exclude the smallest and the largest route. If no other exists, the result is empty, as
                the sandwich rule needs it.

        Examples:
            >>> space = RouteSpace.of_table("toy", [(Slice(width=8 + i),) for i in range(4)])
            >>> routes = space.sample(3, generator=torch.Generator().manual_seed(0), interior=True)
            >>> all(route in space[1:-1] for route in routes)
            True
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise DsnetError(f"the number of routes to draw must be an integer of at least 0, not {count!r}")
        pool = self.routes[1:-1] if interior else self.routes
        if not pool:
            return ()
        picks = torch.randint(len(pool), (count,), generator=generator, device="cpu").tolist()
        return tuple(pool[i] for i in picks)

    # --- plain data --------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {
            "name": self.name,
            "routes": [route.to_dict() for route in self.routes],
            "narrowings": {name: list(numbers) for name, numbers in self.narrowings},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RouteSpace:
        """Restore a space from the result of `to_dict`."""
        _check_fields("a route space", data, {"name", "routes", "narrowings"})
        return cls(
            name=data["name"],
            routes=tuple(Route.from_dict(route) for route in data["routes"]),
            narrowings=tuple((name, tuple(numbers)) for name, numbers in data["narrowings"].items()),
        )


def _integer(value: object) -> int | None:
    """Convert an integer, also of NumPy or torch, to int; return None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError, ValueError):
        return None


def evenly_spaced(count: int, limit: int) -> list[int]:
    """Return at most ``limit`` of ``count`` positions, evenly spaced, including the first and the last.

    Examples:
        >>> evenly_spaced(9, 3), evenly_spaced(2, 3)
        ([0, 4, 8], [0, 1])
    """
    if count <= limit:
        return list(range(count))
    return sorted({round(i * (count - 1) / max(limit - 1, 1)) for i in range(limit)})


def small_medium_large(routes: int) -> dict[str, tuple[int, ...]]:
    """Return the paper's S, M and L of a space with one gate: four routes at the start, middle and end.

    Examples:
        >>> small_medium_large(14)
        {'S': (0, 1, 2, 3), 'M': (5, 6, 7, 8), 'L': (10, 11, 12, 13)}
    """
    if routes < 8:
        return {}
    starts = {"S": 0, "M": (routes - 4) // 2, "L": routes - 4}
    return {name: tuple(range(start, start + 4)) for name, start in starts.items()}


def _check_fields(
    what: str, data: Mapping[str, Any], possible: set[str], required: set[str] | None = None
) -> None:
    unknown = sorted(set(data) - possible, key=str)
    if unknown:
        names = printable(", ".join(map(str, unknown)), 200)
        raise DsnetError(f"{what} has no field {names}; possible: {', '.join(sorted(possible))}")
    missing = sorted((possible if required is None else required) - set(data))
    if missing:
        raise DsnetError(f"{what} lacks the field {', '.join(missing)}")
