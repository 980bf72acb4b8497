"""Classify image files, each image at its own route, on a plan of the runtime."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet import runtime
from dsnet.calibration.calibration import Calibration, has_trained_gates
from dsnet.data.decode import decode, decode_ahead, pillow
from dsnet.data.transforms.augment import normalise
from dsnet.errors import DsnetError
from dsnet.inference.load_run import ClassifierInput, classifier_from_checkpoint
from dsnet.models import Supernet
from dsnet.models.loading import load_classifier
from dsnet.routing.cost_table import CostTable, Unit
from dsnet.routing.policies import GatePolicy, Policy, RoutedOutput, SingleRoutePolicy, policy_class
from dsnet.routing.router import Routed, Router, format_cost, parse_budget
from dsnet.runtime.plan import Plan

__all__ = ["Answer", "FailedImage", "Prediction", "Predictor", "compile_settings", "open_predictor"]

WHOLE = 2**16  # images; larger than any batch


class Answer(NamedTuple):
    """A class and its probability."""

    label: int
    name: str
    probability: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The most probable classes of an image, the route that it took, and the cost of that."""

    path: str
    answers: tuple[Answer, ...]  # the most probable first
    route: int
    routes: tuple[int, ...]  # all routes that ran, in order
    cost: float
    unit: Unit
    image_size: int | None = None  # of the route, where routes differ in it

    @property
    def best(self) -> Answer:
        """The most probable class."""
        return self.answers[0]

    def to_dict(self, *, trace: bool = False) -> dict[str, Any]:
        """Return plain data (JSON types); with ``trace`` also the routes that ran."""
        top = [{"class": a.name, "label": a.label, "probability": a.probability} for a in self.answers]
        return {
            "path": self.path,
            **top[0],
            "route": self.route,
            **({} if self.image_size is None else {"image_size": self.image_size}),
            **({"routes": list(self.routes)} if trace else {}),
            "cost": int(self.cost) if self.unit == "madds" else self.cost,
            "unit": self.unit,
            **({"top": top} if len(top) > 1 else {}),
        }


class FailedImage(NamedTuple):
    """An image without a result, and the reason."""

    path: str
    error: str
    readable: bool  # False: the file cannot be decoded; True: the network's output is not finite

    def to_dict(self) -> dict[str, Any]:
        """Return plain data (JSON types)."""
        return {"path": self.path, "error": self.error}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictor:
    """A plan of a network, with the class names and the preparation of its images."""

    model: Supernet
    plan: Plan
    policy: Policy  # of the plan, or of its only route
    route: int | None  # of all images; None: the policy decides
    classes: tuple[str, ...]
    preprocessing: ClassifierInput

    def __post_init__(self) -> None:
        outputs = self.model.head.classifier.out_features
        if len(self.classes) != outputs:
            raise DsnetError(f"{len(self.classes)} names for the {outputs} classes of the network")

    def __call__(
        self, paths: Sequence[str | Path], *, batch: int = 64, top: int = 1
    ) -> Iterator[Prediction | FailedImage]:
        """Classify image files. The next batch is decoded while the network runs.

        Args:
            paths: Image files.
            batch: Images at a time.
            top: Number of classes in a result.

        Returns:
            An iterator over the results, in the order of ``paths``. An image that cannot be read, or whose
            logits are not finite, is a `FailedImage`.

        Raises:
            DsnetError: ``batch`` is below 1, or ``top`` not from 1 to the number of classes.
        """
        if batch < 1:
            raise DsnetError(f"a batch has at least 1 image, not {batch}")
        if not 1 <= top <= len(self.classes):
            raise DsnetError(f"the {top} most probable classes: the network has {len(self.classes)}")
        pillow()  # without it, every single image would fail
        return self._results([os.fspath(path) for path in paths], batch, top)

    def _results(self, paths: list[str], batch: int, top: int) -> Iterator[Prediction | FailedImage]:
        spec = self.preprocessing

        def read(path: str) -> Tensor:
            return decode(path, spec.size, ratio=spec.crop_ratio)[0]

        following = decode_ahead(read, paths, ahead=batch)
        for start in range(0, len(paths), batch):
            group = paths[start : start + batch]
            decoded = dict(zip(group, following, strict=False))
            images = {path: image for path, image in decoded.items() if isinstance(image, Tensor)}
            results = self._predict(images, top) if images else {}
            for path in group:
                failure = FailedImage(path, f"cannot be read: {decoded[path]}", readable=False)
                yield results.get(path, failure)

    @torch.no_grad()
    def _predict(self, images: dict[str, Tensor], top: int) -> dict[str, Prediction | FailedImage]:
        pixels = torch.stack(list(images.values())).to(self.plan.network.device)
        x = normalise(pixels, self.preprocessing.mean, self.preprocessing.std)
        if self.route is None:
            output = self.plan.run(x)
        else:
            output = RoutedOutput(self.plan(x, self.route), torch.full((len(x),), self.route))
        best = F.softmax(output.logits, 1).topk(top)
        columns = (best.indices, best.values, output.routes, output.finite)
        results: dict[str, Prediction | FailedImage] = {}
        for path, labels, probabilities, route, finite in zip(
            images, *(column.tolist() for column in columns), strict=True
        ):
            if not finite:
                error = f"has no answer: the logits of route {route} are not finite"
                results[path] = FailedImage(path, error, readable=True)
                continue
            ranking = zip(labels, probabilities, strict=True)
            results[path] = Prediction(
                path=path,
                answers=tuple(Answer(label, self.classes[label], share) for label, share in ranking),
                route=route,
                routes=self.policy.path(route),
                cost=self.policy.cost(self.model.space, route),
                unit=self.policy.costs.unit,
                image_size=self.model.space.resolve(route).image_size,
            )
        return results


def compile_settings(backend: str) -> dict[str, Any]:
    """Return settings of `dsnet.runtime.compile` for a plan that is used once.

    With the backend ``eager``, a plan of slices of the model's own weights: nothing is copied, converted or
    timed, so that the first result comes as soon as without a plan. Other backends take longer to compile.
    """
    if backend == "eager":
        return {"backend": backend, "memory": "shared", "batch_buckets": [WHOLE]}
    return {"backend": backend}


def open_predictor(
    run: str | Path,
    *,
    budget: float | str | None = None,
    router: str = "auto",
    route: int | None = None,
    name: str | None = None,
    device: str = "auto",
    backend: str = "eager",
) -> Predictor:
    """Open a run for prediction: routed within a budget, by its gates' own decision, or at one route.

    Args:
        run: The folder of a run.
        budget: Mean cost of an image, as `dsnet.routing.Routed` takes it; needs a calibrated run.
        router: The name of a calibrated router; ``auto`` is the most accurate one at the budget.
        route: The route of all images; neither a budget nor a router may be given with it.
        name: The checkpoint (default: gated, else final, else last).
        device: The device; ``auto`` is a GPU if there is one.
        backend: The runtime backend, see `dsnet.runtime.compile`.

    Raises:
        DsnetError: The run cannot be opened, or cannot route as asked.
    """
    if route is not None and (budget is not None or router != "auto"):
        raise DsnetError("a route is for every image: it takes neither a budget nor a router")
    if router != "auto":
        policy_class(router)  # raises an error if no router has this name
    saved, source = load_classifier(run, name), str(run) if name is None else f"{run} --name {name}"
    classifier = classifier_from_checkpoint(saved, source, device)
    model, size, preprocessing = classifier.model, classifier.size, classifier.preprocessing
    model.input_spec.shape(size)  # raises an error if the network does not take this size
    trained_route = saved.data.get("route")
    if trained_route is not None:
        if budget is not None or router != "auto" or route not in (None, trained_route):
            raise DsnetError(
                f"{source} was trained at route {trained_route} alone: there is nothing to choose"
            )
        route = int(trained_route)
    calibration = None if saved.data.get("routing") is None else classifier.calibration
    costs = CostTable.of_model(model, size) if calibration is None else calibration.costs
    gated = has_trained_gates(saved)
    routed: Supernet | Routed = model
    policy: Policy = GatePolicy(costs=costs)
    if route is not None:
        model.require_statistics(model.space.resolve(route))
        policy = SingleRoutePolicy(costs=costs, routes=(route,), thresholds=())
    elif budget is None and router in ("auto", "gate") and gated:
        pass  # the gates decide by themselves
    elif router == "gate" and not gated:
        raise DsnetError(f"the gates of {source} are not trained; run `dsnet gate {source}` first")
    elif calibration is None:
        raise DsnetError(
            f"{source} has no router that keeps a budget: run `dsnet calibrate {source}` first, or give one "
            f"route for every image: --route N, 0 to {len(model.space) - 1}"
        )
    else:
        routed = Routed(model, *_router_within(budget, router, calibration, source))
        policy = routed.policy
    plan = runtime.compile(
        routed,
        image_size=size,
        routes=None if route is None else [route],
        **compile_settings(backend),
    )
    return Predictor(
        model=model,
        plan=plan,
        policy=policy,
        route=route,
        classes=classifier.classes,
        preprocessing=preprocessing,
    )


def _router_within(
    budget: float | str | None, router: str, calibration: Calibration, source: str
) -> tuple[Router, float | None]:
    """Return the router and the budget as a number; without a needed one, raise what is possible."""
    costs = calibration.costs
    if budget is not None:
        number = parse_budget(budget, costs)
        return calibration.router(router, number), number
    if router != "auto" and policy_class(router).without_budget(costs) is not None:
        return Router(kind=router, costs=costs), None
    low, high = calibration.budget_range(router)
    budgets = f"{format_cost(low, costs.unit)} to {format_cost(high, costs.unit)}"
    shares = f"{low / costs.largest:.1%} to {high / costs.largest:.1%}"
    raise DsnetError(
        f"{source} needs a budget (--budget 45%) from {budgets}, which is {shares} of the largest route; "
        "or one route for every image (--route N)"
    )
