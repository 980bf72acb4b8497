"""A plan: a routed network made ready for a device, called like the network."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dsnet.core.process_bound import InProcess
from dsnet.core.timer import Progress, silent
from dsnet.counts import human
from dsnet.errors import DsnetError, DsnetWarning
from dsnet.models.group_by_route import Decide, greedy
from dsnet.routes import Route
from dsnet.routing.policies import CascadePolicy, GatePolicy, RoutedOutput, gate_decision, run_gated_routes
from dsnet.routing.router import Routed, Router, parse_budget
from dsnet.runtime.backends import get_backend
from dsnet.runtime.break_even import BreakEven, measure
from dsnet.runtime.executors.host import Engine
from dsnet.runtime.executors.penalties import Prices, prices_of
from dsnet.runtime.promotion import promoting
from dsnet.runtime.resident_routes import Maker
from dsnet.runtime.stream import MAX_DELAY_MS, Answer, stream, together

__all__ = ["Plan"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Plan(InProcess):
    """A network with its router on a device. Frozen: several threads may call it, each at its own budget."""

    engine: Engine
    router: Router | None = None
    budget: float | str | None = None
    allow_promotion: bool = False
    allow_bypass: bool = False
    maker: Maker | None = None  # of routes for other budgets; none: the routes are those that were asked for
    paying: BreakEven | None = field(init=False, default=None)  # measured where a bypass is allowed
    routed: Routed | None = field(init=False)
    prices: Prices | None = field(init=False, default=None)  # that gates on a GPU take off their scores
    decide: Decide | None = field(init=False, default=None)  # of gates elsewhere; none: it is a cascade

    def __post_init__(self) -> None:
        if self.router is None and self.budget is not None:
            raise DsnetError(
                "this plan has no calibrated router, so it cannot keep a budget; make it from "
                "dsnet.load_routed(RUN, budget), after `dsnet calibrate RUN`"
            )
        routed = None if self.router is None else Routed(self.engine, self.router, self.budget)
        object.__setattr__(self, "routed", routed)
        object.__setattr__(self, "budget", None if routed is None else routed.budget)
        policy = None if routed is None else routed.policy
        if policy is None:
            object.__setattr__(self, "decide", greedy)
        elif isinstance(policy, GatePolicy):
            choices = [gate.choices for gate in self.engine.gates]
            object.__setattr__(self, "decide", gate_decision(policy.costs, policy.weight, choices))
            if self.engine.graphed is not None:
                prices = prices_of(policy.costs, policy.weight, choices, self.engine.graphed.held)
                object.__setattr__(self, "prices", prices)
        if self.allow_bypass:
            paying = self.break_even()
            object.__setattr__(self, "paying", paying)
            if paying.least != paying.times[0].batch:
                told = f"{paying}\nWhere it does not pay, route {paying.single.number} runs."
                warnings.warn(told, DsnetWarning, stacklevel=4)

    def __call__(self, x: Tensor, route: Route | int | None = None) -> Tensor:
        """Images [B, C, H, W] → logits [B, classes], at one route or, without one, routed."""
        if route is None:
            return self.run(x).logits
        found = self.engine.space.resolve(route)
        if not self.engine.holds(found):
            held = ", ".join(str(r.number) for r in self.held())
            raise DsnetError(
                f"this plan does not hold route {found.number}; it holds {held}. Compile with "
                f"routes=[…, {found.number}] or budgets='all' for others"
            )
        return self.engine.run_route(x, found)

    def run(self, x: Tensor) -> RoutedOutput:
        """Logits, and the number of the route that gave each."""
        self.engine.check_images(x)
        some = len(x) > 0
        if self.paying is not None and some and not self.paying.pays(len(x)):
            logits = self.engine.run_route(x, self.paying.single)
            numbers = torch.full((len(x),), self.paying.single.number, device=logits.device)
            return RoutedOutput(logits, numbers)
        graphed, policy = self.engine.graphed, None if self.routed is None else self.routed.policy
        if graphed is not None and some:
            if isinstance(policy, CascadePolicy):
                return graphed.cascade(x, policy.routes, policy.thresholds)
            return graphed.run(x, self.prices, promote=self.allow_promotion)
        if self.decide is None:
            assert self.routed is not None
            return self.routed.run(x)
        decide = promoting(self.decide, self.engine) if self.allow_promotion else self.decide
        return run_gated_routes(self.engine, x, decide)

    def route(self, x: Tensor) -> Tensor:
        """The number [B] of the route that answers each image."""
        return self.run(x).routes

    def stream(
        self,
        batches: Iterable[Tensor | None],
        *,
        images: int | None = None,
        delay: int = 8,
        max_delay_ms: float = MAX_DELAY_MS,
        progress: Progress = silent,
    ) -> Iterator[Answer]:
        """Batches one after the other, images regrouped across them; answers in the order of the images.

        ``images`` run together, by default as many as suit the device; none waits for more than ``delay``
        further batches, nor for longer than ``max_delay_ms``, also while the source blocks: it is read in a
        thread. What cannot be run, or has logits that are not finite, is answered by its error, and the rest
        go on. Batches are held until then, not copied: each comes in memory of its own.
        """
        total = len(batches) if isinstance(batches, Sized) else 0
        return stream(
            self.run,
            self.engine.check_images,
            progress(batches, total, "batch"),
            images=together(self.engine) if images is None else images,
            delay=delay,
            max_delay_ms=max_delay_ms,
            ahead=self.engine.graphed is not None,
            blocks=not isinstance(batches, list | tuple),
        )

    def break_even(
        self, batches: Iterable[int] | int | None = None, shares: Mapping[int, float] | None = None
    ) -> BreakEven:
        """Measures from which batch size on routing pays at this budget; ``print`` it.

        ``shares`` by route, by default those that the calibration images took, or else equal ones.
        """
        policy = None if self.routed is None else self.routed.policy
        if batches is None:
            batches = (1, 4, 16) if self.engine.graphed is None else (1, 8, 64, 256)
        return measure(
            self.engine,
            self._shares() if shares is None else shares,
            self._single(),
            batches,
            cascade=policy if isinstance(policy, CascadePolicy) else None,
            promote=self.allow_promotion,
        )

    def _shares(self) -> dict[int, float]:
        """Of the routes that images take at this budget."""
        taken: Sequence[tuple[int, int]] = ()
        if self.router is not None and isinstance(self.budget, float):
            taken = self.router.point(self.budget).route_counts
        if not taken:
            decided = [gate.choices for gate in self.engine.gates]
            ways = (self.engine.space.of_choices(way) for way in itertools.product(*decided))
            taken = [(route.number, 1) for route in ways if self.engine.holds(route)]
        total = sum(count for _, count in taken)
        return {number: count / total for number, count in taken}

    def _single(self) -> Route:
        """The largest route within the budget; without one the largest."""
        held = self.held()
        if self.router is None or not isinstance(self.budget, float):
            return held[-1]
        costs, budget = self.router.costs, self.budget
        return max(
            (route for route in held if costs.of(route.choices) <= budget),
            key=lambda route: costs.of(route.choices),
            default=held[0],
        )

    def at(self, budget: float | str | None, *, progress: Progress | None = None) -> Plan:
        """The same plan at another budget.

        Routes that only this budget needs are compiled first, once for all plans that come of this one;
        ``progress`` shows that, by default as it was shown when the plan was made. Nothing is compiled where
        all routes are held. Where a bypass is allowed, what pays at that budget is measured.
        """
        engine = self.engine
        if self.maker is not None and self.router is not None:
            parsed = None if budget is None else parse_budget(budget, self.router.costs)
            engine = self.maker.extended(engine, self.router, parsed, progress)
        return replace(self, engine=engine, budget=budget)

    def shared_network(self) -> str | None:
        """The network whose own weights it runs, if it does."""
        return self.engine.shared_network()

    @property
    def batch_invariant(self) -> bool:
        """Whether an image's route never depends on the others of its batch.

        Promotion and bypass depend on the batch by design. A cascade decides by logits, whose last bits
        depend on the number of images with every backend but onnxruntime.
        """
        alike = self.engine.batch_invariant and not (self.allow_promotion or self.allow_bypass)
        return alike and (self.decide is not None or get_backend(self.engine.backend).invariant_logits)

    def held(self) -> list[Route]:
        """The routes whose parts are there."""
        return [route for route in self.engine.space if self.engine.holds(route)]

    def __repr__(self) -> str:
        engine = self.engine
        return (
            f"Plan({engine.name}, {engine.backend} on {engine.device.type}, {engine.memory}, "
            f"{len(self.held())} routes, {engine.programs} programs, {human(engine.resident)}B of weights, "
            f"budget={self.budget})"
        )
