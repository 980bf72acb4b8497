"""Plans: routed networks, compiled for a device and called like the network."""

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
from dsnet.runtime._break_even import BreakEven, measure
from dsnet.runtime._resident_routes import RouteExtender
from dsnet.runtime.backends.base import get_backend
from dsnet.runtime.executors.composite import AnyCompiled
from dsnet.runtime.stream import MAX_DELAY_MS, StreamResult, stream

__all__ = ["Plan"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Plan(InProcess):
    """A compiled network with its router. It is immutable, and several threads may call it.

    Attributes:
        network: The compiled segments.
        router: The calibrated router, or None to route by the gates' own decisions.
        budget: The budget that the router keeps.
        extender: Compiles choices that other budgets need.
        routed: The network with its router.
        penalties: Cost penalties of the gates' scores.
    """

    network: AnyCompiled
    router: Router | None = None
    budget: float | str | None = None
    extender: RouteExtender | None = None
    routed: Routed | None = field(init=False)
    penalties: CostPenalties | None = field(init=False, default=None)

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
        """Return how images are routed at this budget; None: by the gates' own decisions."""
        return None if self.routed is None else self.routed.policy

    def __call__(self, x: Tensor, route: Route | int | None = None) -> Tensor:
        """Return the logits [B, classes] of images [B, C, H, W], at one route or, by default, routed."""
        if route is None:
            return self.run(x).logits
        resolved = self.network.space.resolve(route)
        if not self.network.holds(resolved):
            compiled = ", ".join(str(r.number) for r in self.routes())
            raise DsnetError(
                f"this plan does not hold route {resolved.number}; it holds {compiled}. Compile with "
                f"routes=[…, {resolved.number}] or budgets='all' for others"
            )
        self.network.check_images(x)
        return self.network.executor.run_route(x, resolved)

    def run(self, x: Tensor) -> RoutedOutput:
        """Return logits and route numbers of images [B, C, H, W]."""
        self.network.check_images(x)
        executor, policy = self.network.executor, self.policy
        if isinstance(policy, CascadePolicy):
            return executor.run_cascade(x, policy.routes, policy.thresholds)
        if policy is None or isinstance(policy, GatePolicy):
            return executor.run_gate(x, self.penalties)
        return policy(self.network, x)

    def route(self, x: Tensor) -> Tensor:
        """Return the number [B] of the route that each image takes."""
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
        """Run batches as a stream: images are regrouped across batches, and results come in their order.

        An image that cannot run, or whose logits are not finite, gives an error; the others are not affected.

        Args:
            batches: Batches [B, C, H, W], read in a thread. They are not copied: each must have memory of its
                own. None stands for an image that could not be read.
            images: How many images run together (default: what suits the device).
            delay: For how many further batches a batch waits at most.
            max_delay_ms: For how many milliseconds it waits at most, also while ``batches`` blocks.
            progress: Shows the batches.

        Yields:
            The result of each image.
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
        """Measure from which batch size on routing pays at this budget; print the result for a table.

        Args:
            batches: Batch sizes (default: some that suit the device).
            shares: Shares by route (default: those of the calibration images, or else equal shares).
        """
        if batches is None:
            batches = (1, 8, 64, 256) if self.network.executor.asynchronous else (1, 4, 16)
        return measure(
            self.network,
            self._shares() if shares is None else shares,
            self._largest_within_budget(),
            batches,
            cascade=self.policy if isinstance(self.policy, CascadePolicy) else None,
        )

    def _shares(self) -> dict[int, float]:
        counts: Sequence[tuple[int, int]] = ()
        if self.router is not None and isinstance(self.budget, float):
            counts = self.router.point(self.budget).route_counts
        if not counts:
            choices = itertools.product(*(gate.choices for gate in self.network.gates))
            routes = map(self.network.space.of_choices, choices)
            counts = [(route.number, 1) for route in routes if self.network.holds(route)]
        total = sum(count for _, count in counts)
        return {number: count / total for number, count in counts}

    def _largest_within_budget(self) -> Route:
        routes = self.routes()
        if self.router is None or not isinstance(self.budget, float):
            return routes[-1]
        costs, budget = self.router.costs, self.budget
        affordable = (route for route in routes if costs.of(route.choices) <= budget)
        return max(affordable, key=lambda route: costs.of(route.choices), default=routes[0])

    def at(self, budget: float | str | None, *, progress: Progress | None = None) -> Plan:
        """Return the plan at another budget.

        Choices that only this budget needs are compiled first, once for all plans derived from this one.

        Args:
            budget: The budget, as `dsnet.routing` parses it.
            progress: Shows what is compiled (default: the callback that the plan was compiled with).
        """
        compiled = self.network
        if self.extender is not None and self.router is not None:
            parsed = None if budget is None else parse_budget(budget, self.router.costs)
            compiled = self.extender.extended(compiled, self.router, parsed, progress)
        return replace(self, network=compiled, budget=budget)

    def shared_network(self) -> str | None:
        """Return the name of the network whose weights it shares, if it does."""
        return self.network.shared_network()

    @property
    def batch_invariant(self) -> bool:
        """Whether an image's route never depends on the other images of its batch.

        A cascade decides by logits. Their last bits depend on the number of images, except with onnxruntime.
        """
        by_logits = isinstance(self.policy, CascadePolicy)
        return self.network.batch_invariant and (
            not by_logits or get_backend(self.network.backend).invariant_logits
        )

    def routes(self) -> list[Route]:
        """Return the compiled routes, by size."""
        return [route for route in self.network.space if self.network.holds(route)]

    def __repr__(self) -> str:
        compiled = self.network
        return (
            f"Plan({compiled.name}, {compiled.backend} on {compiled.device.type}, {compiled.memory}, "
            f"{len(self.routes())} routes, {compiled.num_programs} programs, "
            f"{human(compiled.resident)}B of weights, "
            f"budget={self.budget})"
        )
