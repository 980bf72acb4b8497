"""From image files to classes: every image at its route, prepared as the test split is."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.calibration.calibration import Calibration, has_trained_gates
from dsnet.core.checkpoint import Checkpoint
from dsnet.core.cpus import available_cpus
from dsnet.core.device import pick_device
from dsnet.data.dataset import check_ratio
from dsnet.data.decode import THREADS, DecodeError, decode, pillow
from dsnet.data.transforms.augment import check_channels, normalise
from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.models.loading import build_network, load_classifier
from dsnet.routing.cost_table import CostTable, Unit
from dsnet.routing.policies import CascadePolicy, GatePolicy, Policy, policy_class
from dsnet.routing.router import Routed, format_cost, parse_budget
from dsnet.training.stage1.teacher import Channels

__all__ = ["Answer", "Prediction", "Predictor", "Unanswered", "Unread", "open_predictor"]


class Answer(NamedTuple):
    """A class, and how probable the network holds it."""

    label: int
    name: str
    probability: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What an image shows, the route that said so, and what that cost."""

    path: str
    answers: tuple[Answer, ...]  # the most probable first
    route: int
    routes: tuple[int, ...]  # all that ran, in order
    cost: float
    unit: Unit

    @property
    def best(self) -> Answer:
        """The most probable class."""
        return self.answers[0]

    def to_dict(self, *, trace: bool = False) -> dict[str, Any]:
        """Plain data (JSON types); with ``trace`` also the routes that ran."""
        top = [{"class": a.name, "label": a.label, "probability": a.probability} for a in self.answers]
        return {
            "path": self.path,
            **top[0],
            "route": self.route,
            **({"routes": list(self.routes)} if trace else {}),
            "cost": int(self.cost) if self.unit == "madds" else self.cost,
            "unit": self.unit,
            **({"top": top} if len(top) > 1 else {}),
        }


class Unread(NamedTuple):
    """An image that could not be read, and why."""

    path: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON types)."""
        return {"path": self.path, "error": f"cannot be read: {self.reason}"}


class Unanswered(NamedTuple):
    """An image for which the network gave no answer, and why."""

    path: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON types)."""
        return {"path": self.path, "error": f"has no answer: {self.reason}"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictor:
    """A network, the policy that routes its images, and how they are prepared."""

    model: Supernet
    policy: Policy
    classes: tuple[str, ...]
    channels: Channels
    size: int
    crop_ratio: float = 1.0  # of size to the shorter side that images are resized to before they are cropped

    def __post_init__(self) -> None:
        check_ratio("crop_ratio", self.crop_ratio)
        outputs = self.model.head.classifier.out_features
        if len(self.classes) != outputs:
            raise DsnetError(f"{len(self.classes)} names for the {outputs} classes of the network")
        self.model.input_spec.shape(self.size)  # raises where the network does not take this size
        check_channels(*self.channels)

    def __call__(
        self, paths: Sequence[str | Path], *, batch: int = 64, top: int = 1
    ) -> Iterator[Prediction | Unread | Unanswered]:
        """What every image shows, in the order of ``paths``; results come batch by batch.

        An image that cannot be read, or whose logits are not finite, is answered by that; the others go on.
        ``top`` is how many classes an answer names. The next batch is decoded while the network runs.
        """
        if batch < 1:
            raise DsnetError(f"a batch has at least 1 image, not {batch}")
        if not 1 <= top <= len(self.classes):
            raise DsnetError(f"the {top} most probable classes: the network has {len(self.classes)}")
        pillow()  # else every image would be missed for the lack of it
        return self._results([os.fspath(path) for path in paths], batch, top)

    def _results(self, paths: list[str], batch: int, top: int) -> Iterator[Prediction | Unread | Unanswered]:
        for decoded in _decoded(paths, self.size, self.crop_ratio, batch):
            good = {path: image for path, image in decoded if isinstance(image, Tensor)}
            known = self._answered(good, top) if good else {}
            for path, image in decoded:
                yield Unread(path, image) if isinstance(image, str) else known[path]

    @torch.no_grad()
    def _answered(self, images: dict[str, Tensor], top: int) -> dict[str, Prediction | Unanswered]:
        pixels = torch.stack(list(images.values())).to(self.model.head.classifier.weight.device)
        output = self.policy(self.model, normalise(pixels, *self.channels))
        best = F.softmax(output.logits, 1).topk(top)
        numbers = best.indices.tolist(), best.values.tolist(), output.routes.tolist(), output.finite.tolist()
        found: dict[str, Prediction | Unanswered] = {}
        for path, labels, shares, route, finite in zip(images, *numbers, strict=True):
            if not finite:
                found[path] = Unanswered(path, f"the logits of route {route} are not finite")
                continue
            found[path] = Prediction(
                path=path,
                answers=tuple(Answer(n, self.classes[n], p) for n, p in zip(labels, shares, strict=True)),
                route=route,
                routes=self.policy.path(route),
                cost=self.policy.cost(self.model.space, route),
                unit=self.policy.costs.unit,
            )
        return found


def _decoded(
    paths: list[str], size: int, ratio: float, batch: int
) -> Iterator[list[tuple[str, Tensor | str]]]:
    """Batches of (path, image [3, size, size] of bytes, or why there is none), one batch ahead."""
    groups = [paths[start : start + batch] for start in range(0, len(paths), batch)]
    threads = ThreadPoolExecutor(min(THREADS, available_cpus()))  # Pillow decodes without holding the GIL

    def read(path: str) -> Tensor | str:
        try:
            return decode(path, size, ratio=ratio)[0]
        except DecodeError as error:
            return str(error)

    def begin(at: int) -> list[Future[Tensor | str]]:
        return [threads.submit(read, path) for path in groups[at]] if at < len(groups) else []

    try:
        ahead = begin(0)
        for at, group in enumerate(groups):
            now, ahead = ahead, begin(at + 1)
            yield [(path, image.result()) for path, image in zip(group, now, strict=True)]
    finally:
        threads.shutdown(cancel_futures=True)


def open_predictor(
    run: str | Path,
    *,
    budget: float | str | None = None,
    router: str = "auto",
    route: int | None = None,
    name: str | None = None,
    device: str = "auto",
) -> Predictor:
    """The network of a run, routed within a budget, by its gates' own decision, or at one route.

    A budget needs a calibrated run, the gates' own decision trained gates, one route neither.
    """
    if route is not None and (budget is not None or router != "auto"):
        raise DsnetError("a route is for every image: it takes neither a budget nor a router")
    if router != "auto":
        policy_class(router)  # raises an error if no router has this name
    where = str(run) if name is None else f"{run} --name {name}"
    saved = load_classifier(run, name)
    known = saved.data.get("input")
    if known is None:
        raise DsnetError(
            f"{run} does not say how its images were normalised; `dsnet recalibrate` notes it, or "
            'save it with save_checkpoint(..., data={"input": {"mean": [...], "std": [...]}})'
        )
    model = build_network(saved).to(pick_device(device))
    size = _side(saved, model)
    alone = saved.data.get("route")
    if alone is not None:
        if budget is not None or router != "auto" or route not in (None, alone):
            raise DsnetError(f"{where} was trained at route {alone} alone: there is nothing to choose")
        route = int(alone)
    calibration = None if saved.data.get("routing") is None else Calibration.of(saved, where)
    costs = CostTable.of_model(model, size) if calibration is None else calibration.costs
    gated = has_trained_gates(saved)
    policy: Policy
    if route is not None:
        model.require_statistics(model.space.resolve(route))
        policy = CascadePolicy(costs=costs, routes=(route,), thresholds=())  # its first route is its last
    elif budget is None and router in ("auto", "gate") and gated:
        policy = GatePolicy(costs=costs)
    elif router == "gate" and not gated:
        raise DsnetError(f"the gates of {where} are not trained; run `dsnet gate {where}` first")
    elif calibration is None:
        raise DsnetError(
            f"{where} has no router that keeps a budget: run `dsnet calibrate {where}` first, or give one "
            f"route for every image: --route N, 0 to {len(model.space) - 1}"
        )
    else:
        policy = _within(budget, router, calibration, model, where)
    numbers = map(str, range(model.head.classifier.out_features))
    return Predictor(
        model=model,
        policy=policy,
        classes=tuple(saved.data.get("classes") or numbers),
        channels=(tuple(known["mean"]), tuple(known["std"])),
        size=size,
        crop_ratio=known.get("crop_ratio", 1.0),
    )


def _side(saved: Checkpoint, model: Supernet) -> int:
    """Side of the images that the run was tested with."""
    known = saved.data.get("input")
    return int((known or {}).get("size") or model.input_spec.image_size)


def _within(
    budget: float | str | None, router: str, calibration: Calibration, model: Supernet, where: str
) -> Policy:
    """The policy that keeps a budget; without one, an error that says which are possible."""
    costs = calibration.costs
    if budget is None:
        policy = None if router == "auto" else policy_class(router).without_budget(costs)
        if policy is not None:
            return policy
        low, high = calibration.budget_range(router)
        reach = f"{format_cost(low, costs.unit)} to {format_cost(high, costs.unit)}"
        shares = f"{low / costs.largest:.1%} to {high / costs.largest:.1%}"
        raise DsnetError(
            f"{where} needs a budget (--budget 45%) from {reach}, which is {shares} of the largest route; "
            "or one route for every image (--route N)"
        )
    number = parse_budget(budget, costs) if isinstance(budget, str) else budget
    return Routed(model, calibration.router(router, number), number).policy
