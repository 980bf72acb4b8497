"""A detector from images with boxes: all routes together, their statistics, then the gate.

Draws depend on the seed and on the step alone, so a run goes on where it was stopped as if nothing had been.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsnet.detection.augment import ssd_augment, whole
from dsnet.detection.calibrate import recalibrate_detector
from dsnet.detection.config import BoxOptim, DetectConfig
from dsnet.detection.evaluate import DetectionResult, evaluate_detector, prepare
from dsnet.detection.fssd import Detector
from dsnet.detection.gate import GateTraining
from dsnet.detection.loss import Targets, multibox_loss, targets_in
from dsnet.detection.pictures import Boxes, Pictures, load_pictures, read_splits
from dsnet.detection.saved import Prepared, SavedDetector, detector_of, save_detector
from dsnet.detection.voc import Problem
from dsnet.errors import DsnetError
from dsnet.models import Supernet, create_model
from dsnet.routes import Route, RouteSpace
from dsnet.routing.config import GateConfig
from dsnet.training.checkpoint import Checkpoint, load_checkpoint, optimizer_tensors, restore_optimizer
from dsnet.training.folder import locked
from dsnet.training.interrupt import StopRequest, stop_on_signals
from dsnet.training.loop import Ending, Watch
from dsnet.training.optim import cosine, make_optimizer, parameter_groups, set_learning_rate
from dsnet.training.records import LossBuffer, MetricsFile
from dsnet.training.run import pick_device
from dsnet.training.seeds import seeded
from dsnet.training.settings import from_plain, to_plain
from dsnet.training.transfer import start_from, trained_on

__all__ = ["DetectionOutcome", "open_pictures", "rate_at", "step_times", "train_detector"]

SHOWN = 16  # routes that are evaluated at the end, at most
MEMORY = 0.4  # of a GPU's free memory that images may take
PROBLEMS = "problems.txt"  # of a run: what is wrong with files


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionOutcome:
    """What a run came to."""

    folder: Path
    ending: Ending
    classes: tuple[str, ...]
    results: tuple[DetectionResult, ...] = ()  # routes, then the gate; none where the run was stopped
    problems: tuple[Problem, ...] = ()
    tested: tuple[Path, ...] = ()  # the test images


def train_detector(
    config: DetectConfig, folder: Path, *, resume: bool = False, watch: Watch | None = None
) -> DetectionOutcome:
    """Trains into a folder: ``last`` while it trains, ``final`` with statistics, ``gated`` with a gate."""
    watch = watch or Watch()
    if not config.data.root:
        raise DsnetError("where are the images? Give data.root: a folder in VOC's layout")
    device = pick_device(config.run.device)
    with locked(folder):
        saved = _begin(folder, config, resume=resume, watch=watch)
        train, test, problems = open_pictures(config, device, watch)
        found = _detector(config, train, saved, folder)
        if config.gate.epochs:  # a wrong one would be told at the end else
            GateConfig(space=config.gate.space).routes(found.detector.network)
        training = _Training(config, found, train, folder, device, watch)
        if saved is not None:
            training.restore(saved)
        _write_config(folder, config)
        if problems:
            text = "".join(f"{problem.file}: {problem.what}\n" for problem in problems)
            (folder / PROBLEMS).write_text(text, encoding="utf-8")
        with stop_on_signals(watch.told) as request:  # later signals act at once: what was trained is saved
            ending = training.run(request)
        if not ending.done:
            return DetectionOutcome(folder=folder, ending=ending, classes=train.classes, problems=problems)
        routes = _some(found.detector.network.space)
        training.calibrate()
        training.save("final")
        results = list(training.evaluate(test, routes))
        if config.gate.epochs and len(routes) > 1:
            gate = GateTraining(config, found, training.precision)
            gate.train(training.epoch_for_gate, -(-len(train) // config.gate.batch), watch)
            training.save("gated", {"gate": to_plain(config.gate)})
            results += training.evaluate(test, [None])
        _write_results(folder, config, train.classes, results)
        return DetectionOutcome(
            folder=folder,
            ending=ending,
            classes=train.classes,
            results=tuple(results),
            problems=problems,
            tested=test.paths,
        )


def open_pictures(
    config: DetectConfig, device: torch.device, watch: Watch
) -> tuple[Pictures, Pictures, tuple[Problem, ...]]:
    """Training and test images, on the device if there is room; and what is wrong with files."""
    data = config.data
    first = read_splits(data.root, data.train, data.classes)
    both = [first, read_splits(data.root, data.test, first.classes)]
    problems = tuple(problem for part in both for problem in part.problems)
    found = []
    for part, side in zip(both, (data.side, data.size), strict=True):
        pictures, damaged = load_pictures(
            part, side, lambda items, total, what: watch.progress(what, iter(items), total)
        )
        problems += damaged
        found.append(_placed(pictures, device))
    for problem in problems[:5]:
        watch.told(f"{problem.file}: {problem.what}")
    if len(problems) > 5:
        watch.told(f"and {len(problems) - 5} more problems with files: {PROBLEMS} of the run lists them")
    shared = set(found[0].paths) & set(found[1].paths)
    if shared:
        watch.told(f"{len(shared)} images are in both splits, as {sorted(shared)[0]}: figures mean little")
    for pictures, split in zip(found, (data.train, data.test), strict=True):
        if bool((pictures.boxes.classes < 0).all()):
            raise DsnetError(f"{data.root}, {split}: there is no box that is not marked as difficult")
    if len(found[0]) < config.optim.batch:
        raise DsnetError(f"{len(found[0])} training images do not fill a batch of {config.optim.batch}")
    return found[0], found[1], problems


def step_times(config: DetectConfig, steps: int = 20) -> tuple[float, float]:
    """Milliseconds of a whole step of training, and of one on a batch that is ready; nothing is kept."""
    device, watch = pick_device(config.run.device), Watch()
    train, _, _ = open_pictures(config, device, watch)
    training = _Training(config, _detector(config, train, None, Path()), train, Path(), device, watch)
    batch = training.ready()
    taken = []
    for made in (True, False):
        for step in range(3 + steps):
            if step == 3:
                _wait(device)
                begun = time.perf_counter()
            training.learn(*(training.ready() if made else batch))
            training.step = (training.step + 1) % training.epoch_steps
        _wait(device)
        taken.append(1e3 * (time.perf_counter() - begun) / steps)
    return taken[0], taken[1]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _placed(pictures: Pictures, device: torch.device) -> Pictures:
    if device.type != "cuda":
        return pictures
    free, _ = torch.cuda.mem_get_info(device)
    return pictures.to(device) if pictures.images.nbytes < MEMORY * free else pictures


def rate_at(optim: BoxOptim, step: int, epoch_steps: int) -> float:
    """The learning rate of a step."""
    warmup = round(optim.warmup * epoch_steps)
    if not optim.milestones:
        return optim.lr * cosine(step, steps=optim.epochs * epoch_steps, warmup=warmup)
    rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
    return optim.lr * rise * 0.1 ** sum(step >= epoch * epoch_steps for epoch in optim.milestones)


class _Training:
    """All routes of a detector, by the losses of the largest, the smallest and some between."""

    def __init__(
        self,
        config: DetectConfig,
        found: SavedDetector,
        train: Pictures,
        folder: Path,
        device: torch.device,
        watch: Watch,
    ) -> None:
        self.config, self.found, self.train, self.folder = config, found, train, folder
        self.device, self.watch = device, watch
        self.detector = found.detector.to(device)
        if config.run.channels_last:
            self.detector.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        # On a CPU torch's bfloat16 gradients of small maps are wrong.
        half = config.run.precision == "bfloat16" and device.type == "cuda"
        self.precision = torch.bfloat16 if half else None
        self.priors = self.detector.priors(config.data.size)
        if train.boxes.classes.shape[1] > len(self.priors):
            at = int((train.boxes.classes >= 0).sum(1).argmax())
            raise DsnetError(f"{train.paths[at]} has more boxes than there are priors ({len(self.priors)})")
        optim = config.optim
        groups = parameter_groups([self.detector], optim.weight_decay)
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        self.optimizer = make_optimizer("sgd", groups, lr=optim.lr, momentum=optim.momentum)
        self.epoch_steps = len(train) // optim.batch
        self.steps, self.step = optim.epochs * self.epoch_steps, 0

    def restore(self, saved: Checkpoint) -> None:
        """Where a run that was stopped left off."""
        before, now = saved.data.get("trained_on"), self._trained_on()
        if before != now:
            raise DsnetError(f"{self.folder} was started with {before}, the data has {now} now")
        self.step = saved.data["step"]
        if "optimizer" in saved.tensors:
            restore_optimizer(self.optimizer, saved.tensors["optimizer"])

    def run(self, request: StopRequest) -> Ending:
        """Trains until the end, or until a signal asks to stop; then saves."""
        config, metrics = self.config, MetricsFile(self.folder, after=self.step)
        self.watch.started(self.step, self.steps)
        losses, begun, at = LossBuffer(), time.monotonic(), self.step
        kept = begun
        try:
            while self.step < self.steps and not request:
                losses.add(self.step, self.learn(*self.ready()))
                self.step += 1
                epoch = (self.step - 1) // self.epoch_steps
                self.watch.stepped(self.step, epoch, config.optim.batch)
                if self.step % config.run.log_every == 0 or self.step == self.steps:
                    values = losses.means()
                    seconds = time.monotonic() - begun
                    values["images_per_s"] = (self.step - at) * config.optim.batch / seconds
                    values["lr"] = rate_at(config.optim, self.step - 1, self.epoch_steps)
                    begun, at = time.monotonic(), self.step
                    metrics.write("train", self.step, values)
                    self.watch.logged(self.step, values)
                    if begun - kept > 60 * config.run.save_minutes:
                        self.save("last", optimizer=True)
                        kept = time.monotonic()
            losses.means()  # else a diverged network would take the place of a good one
            self.save("last", optimizer=True)
        finally:
            metrics.close()
        return Ending(step=self.step, steps=self.steps, signal=request.signal)

    def ready(self) -> tuple[Tensor, Targets]:
        """The batch of the step that comes next."""
        batch = self.config.optim.batch
        epoch, place = divmod(self.step, self.epoch_steps)
        order = torch.randperm(len(self.train), generator=seeded(self.config.run.seed, "order", epoch))
        x, boxes = self.batch(order[place * batch : (place + 1) * batch], self.step)
        return x, targets_in(self.priors, boxes)

    def learn(self, x: Tensor, targets: Targets) -> dict[str, Tensor]:
        """Forward, backward and optimiser; losses by name."""
        optim, seed = self.config.optim, self.config.run.seed
        self.detector.train()
        set_learning_rate(self.optimizer, rate_at(optim, self.step, self.epoch_steps))
        routes = self._routes(seeded(seed, "routes", self.step))
        place_loss, kind_loss = [], []
        with torch.autocast(self.device.type, self.precision, enabled=self.precision is not None):
            answers = list(self.detector.answers(x, routes))
        for answer in answers:
            loss = multibox_loss(*answer, targets)
            matched = loss.matched.sum().clamp(min=1)
            place_loss.append(loss.place.sum() / matched)
            kind_loss.append(loss.kind.sum() / matched)
        total = (torch.stack(place_loss) + torch.stack(kind_loss)).mean()
        self.optimizer.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]
        if optim.clip:
            torch.nn.utils.clip_grad_norm_(self.parameters, optim.clip)
        self.optimizer.step()
        terms = {"loss": total}
        for name, place_of, kind_of in zip(("largest", "smallest"), place_loss, kind_loss, strict=False):
            terms |= {f"{name}/place": place_of, f"{name}/kind": kind_of}
        return terms

    def _routes(self, draws: torch.Generator) -> list[Route]:
        space = self.detector.network.space
        if len(space) == 1:
            return [space.largest]
        between = [route for route in space if route not in (space.smallest, space.largest)]
        count = min(self.config.optim.random, len(between))
        drawn = torch.randperm(len(between), generator=draws)[:count].tolist()
        return [space.largest, space.smallest, *(between[i] for i in drawn)]

    def batch(self, positions: Tensor, step: int) -> tuple[Tensor, Boxes]:
        """Images as the network wants them, augmented by the draws of that step, and their boxes."""
        data, seed = self.config.data, self.config.run.seed
        at = positions.to(self.train.images.device)
        images = self.train.images[at].to(self.device, non_blocking=True)
        boxes = self.train.boxes.take(at).first(self.train.most(positions))
        mean = self.found.prepared.mean
        if data.augment:
            x, boxes = ssd_augment(images, boxes.to(self.device), data.size, mean, seeded(seed, "cut", step))
        else:
            x, boxes = whole(images, boxes.to(self.device), data.size, mean)
        x = prepare(x, self.found.prepared)
        if self.config.run.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        return x, boxes

    def batches(self, count: int, size: int, purpose: int) -> Iterator[tuple[Tensor, Boxes]]:
        """So many training images in a drawn order, in batches."""
        order = torch.randperm(len(self.train), generator=seeded(self.config.run.seed, "drawn", purpose))
        for start in range(0, min(count, len(order)), size):
            yield self.batch(order[start : start + size], self.steps + purpose * len(order) + start)

    def epoch_for_gate(self, number: int) -> Iterator[tuple[Tensor, Boxes]]:
        """All training images once."""
        return self.batches(len(self.train), self.config.gate.batch, 1 + number)

    def calibrate(self) -> None:
        """The statistics of all routes, from images as training saw them."""
        count = min(self.config.data.calibration, len(self.train))
        size = self.config.optim.batch
        parts = self.watch.progress("statistics: batch", self.batches(count, size, 0), -(-count // size))
        recalibrate_detector(self.detector, (x for x, _ in parts))
        self.detector.eval()

    def evaluate(self, test: Pictures, routes: Sequence[Route | None]) -> Iterator[DetectionResult]:
        """On the test images."""
        return evaluate_detector(
            self.detector,
            test,
            self.found.prepared,
            routes,
            batch=self.config.optim.batch,
            progress=lambda items, total, what: self.watch.progress(what, iter(items), total),
        )

    def _trained_on(self) -> dict[str, Any]:
        return {"classes": list(self.train.classes), "images": len(self.train)}

    def save(self, name: str, data: dict[str, Any] | None = None, *, optimizer: bool = False) -> None:
        """A checkpoint."""
        save_detector(
            self.folder,
            name,
            self.detector,
            step=self.step,
            classes=self.train.classes,
            prepared=self.found.prepared,
            tensors={"optimizer": optimizer_tensors(self.optimizer)} if optimizer else None,
            data={"trained_on": self._trained_on(), "steps": self.steps, **(data or {})},
        )


def _begin(folder: Path, config: DetectConfig, *, resume: bool, watch: Watch) -> Checkpoint | None:
    kept = [name for name in ("last", "final", "gated") if (folder / name).is_file()]
    if not resume:
        if kept:
            raise DsnetError(
                f"{folder} holds a run already: go on with it (--resume) or choose another folder"
            )
        return None
    if "last" not in kept:
        watch.told(f"there is no checkpoint in {folder} to go on from: starting anew")
        return None
    try:
        plain = json.loads((folder / "recipe.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DsnetError(f"{folder / 'recipe.json'} cannot be read: {error}") from error
    before, now = to_plain(from_plain(DetectConfig, plain)), to_plain(config)
    changed = [key for key in now if key not in ("run", "gate") and before[key] != now[key]]
    changed += ["run.seed"] * (before["run"]["seed"] != now["run"]["seed"])
    if changed:
        raise DsnetError(f"{folder} was started with other settings of {', '.join(changed)}")
    return load_checkpoint(folder, "last")


def _detector(config: DetectConfig, train: Pictures, saved: Checkpoint | None, folder: Path) -> SavedDetector:
    """A run's own, or one that begins: with the weights of a classifier, or with none."""
    if saved is not None:
        return detector_of(saved, folder)
    draws = seeded(config.run.seed, "weights")
    network = create_model(config.model, generator=draws, **config.options)
    if not isinstance(network, Supernet):
        raise DsnetError(f"{config.model} is a static network; `dsnet models` lists the supernets")
    mean, std = train.statistics()
    if config.start is not None:
        begun = start_from(network, config.start)
        known = trained_on(begun, config.start)
        mean, std = tuple(known["mean"]), tuple(known["std"])
    detector = Detector(network, len(train.classes), config.table, generator=draws)
    return SavedDetector(
        detector, train.classes, Prepared(config.data.size, mean, std), Checkpoint(tensors={}, data={})
    )


def _some(space: RouteSpace) -> list[Route]:
    """All routes, or some spread ones with the smallest and the largest."""
    every = list(space)
    if len(every) <= SHOWN:
        return every
    return [every[round(i * (len(every) - 1) / (SHOWN - 1))] for i in range(SHOWN)]


def _write_config(folder: Path, config: DetectConfig) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.json").write_text(json.dumps(to_plain(config), indent=2) + "\n", encoding="utf-8")


def _write_results(
    folder: Path, config: DetectConfig, classes: Sequence[str], results: Sequence[DetectionResult]
) -> None:
    plain = {
        "model": config.model,
        "classes": list(classes),
        "size": config.data.size,
        "results": [result.to_dict() for result in results],
    }
    (folder / "results.json").write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
