"""A plan: a routed network made ready for a device, called like the network."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace

from torch import Tensor

from dsnet.core.process_bound import InProcess
from dsnet.core.timer import Progress, silent
from dsnet.counts import human
from dsnet.errors import DsnetError
from dsnet.routes import Route
from dsnet.routing.cost_table import CostPenalties
from dsnet.routing.policies import CascadePolicy, GatePolicy, Policy, RoutedOutput
from dsnet.routing.router import Routed, Router, parse_budget
from dsnet.runtime.backends.base import get_backend
from dsnet.runtime.break_even import BreakEven, measure
from dsnet.runtime.executors.host import CompiledNetwork
from dsnet.runtime.resident_routes import RouteExtender
from dsnet.runtime.stream import MAX_DELAY_MS, StreamResult, stream

__all__ = ["Plan"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Plan(InProcess):
    """A network with its router on a device. Frozen: several threads may call it, each at its own budget."""

    network: CompiledNetwork
    router: Router | None = None
    budget: float | str | None = None
    extender: RouteExtender | None = None  # compiles routes that other budgets need
    routed: Routed | None = field(init=False)
    penalties: CostPenalties | None = field(init=False, default=None)  # subtracted from the gates' scores

    def __post_init__(self) -> None:
        if self.router is None and self.budget is not None:
            raise DsnetError(
                "this plan has no calibrated router, so it cannot keep a budget; make it from "
                "dsnet.load(RUN).routed(budget), after `dsnet calibrate RUN`"
            )
        routed = None if self.router is None else Routed(self.network, self.router, self.budget)
        object.__setattr__(self, "routed", routed)
        object.__setattr__(self, "budget", None if routed is None else routed.budget)
        if isinstance(self.policy, GatePolicy) and self.policy.weight:
            choices = [gate.choices for gate in self.network.gates]
            object.__setattr__(self, "penalties", self.policy.costs.penalties(self.policy.weight, choices))

    @property
    def policy(self) -> Policy | None:
        """How images are routed at this budget; None is the gates' own decision."""
        return None if self.routed is None else self.routed.policy

    def __call__(self, x: Tensor, route: Route | int | None = None) -> Tensor:
        """Images [B, C, H, W] → logits [B, classes], at one route or, without one, routed."""
        if route is None:
            return self.run(x).logits
        found = self.network.space.resolve(route)
        if not self.network.holds(found):
            held = ", ".join(str(r.number) for r in self.held())
            raise DsnetError(
                f"this plan does not hold route {found.number}; it holds {held}. Compile with "
                f"routes=[…, {found.number}] or budgets='all' for others"
            )
        self.network.check_images(x)
        return self.network.executor.run_route(x, found)

    def run(self, x: Tensor) -> RoutedOutput:
        """Logits, and the number of the route that gave each."""
        self.network.check_images(x)
        executor, policy = self.network.executor, self.policy
        if isinstance(policy, CascadePolicy):
            return executor.run_cascade(x, policy.routes, policy.thresholds)
        if policy is None or isinstance(policy, GatePolicy):
            return executor.run_gate(x, self.penalties)
        return policy(self.network, x)

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
    ) -> Iterator[StreamResult]:
        """Batches one after the other, images regrouped across them; answers in the order of the images.

        ``images`` run together, by default as many as suit the device; none waits for more than ``delay``
        further batches, nor for longer than ``max_delay_ms``, also while the source blocks: it is read in a
        thread. What cannot be run, or has logits that are not finite, is answered by its error, and the rest
        go on. Batches are held until then, not copied: each comes in memory of its own.
        """
        total = len(batches) if isinstance(batches, Sized) else 0
        return stream(
            self.run,
            self.network.check_images,
            progress(batches, total, "batch"),
            images=self.network.executor.max_batch if images is None else images,
            delay=delay,
            max_delay_ms=max_delay_ms,
            ahead=self.network.executor.asynchronous,
            blocks=not isinstance(batches, list | tuple),
        )

    def break_even(
        self, batches: Iterable[int] | int | None = None, shares: Mapping[int, float] | None = None
    ) -> BreakEven:
        """Measures from which batch size on routing pays at this budget; ``print`` it.

        ``shares`` by route, by default those that the calibration images took, or else equal ones.
        """
        if batches is None:
            batches = (1, 8, 64, 256) if self.network.executor.asynchronous else (1, 4, 16)
        return measure(
            self.network,
            self._shares() if shares is None else shares,
            self._single(),
            batches,
            cascade=self.policy if isinstance(self.policy, CascadePolicy) else None,
        )

    def _shares(self) -> dict[int, float]:
        """Of the routes that images take at this budget."""
        taken: Sequence[tuple[int, int]] = ()
        if self.router is not None and isinstance(self.budget, float):
            taken = self.router.point(self.budget).route_counts
        if not taken:
            decided = [gate.choices for gate in self.network.gates]
            ways = (self.network.space.of_choices(way) for way in itertools.product(*decided))
            taken = [(route.number, 1) for route in ways if self.network.holds(route)]
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
        all routes are held.
        """
        compiled = self.network
        if self.extender is not None and self.router is not None:
            parsed = None if budget is None else parse_budget(budget, self.router.costs)
            compiled = self.extender.extended(compiled, self.router, parsed, progress)
        return replace(self, network=compiled, budget=budget)

    def shared_network(self) -> str | None:
        """The network whose own weights it runs, if it does."""
        return self.network.shared_network()

    @property
    def batch_invariant(self) -> bool:
        """Whether an image's route never depends on the others of its batch.

        A cascade decides by logits, whose last bits depend on the number of images with every backend but
        onnxruntime.
        """
        logits_decide = isinstance(self.policy, CascadePolicy)
        return self.network.batch_invariant and (
            not logits_decide or get_backend(self.network.backend).invariant_logits
        )

    def held(self) -> list[Route]:
        """The routes whose parts are there."""
        return [route for route in self.network.space if self.network.holds(route)]

    def __repr__(self) -> str:
        compiled = self.network
        return (
            f"Plan({compiled.name}, {compiled.backend} on {compiled.device.type}, {compiled.memory}, "
            f"{len(self.held())} routes, {compiled.num_programs} programs, "
            f"{human(compiled.resident)}B of weights, "
            f"budget={self.budget})"
        )
