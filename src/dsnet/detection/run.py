"""A detector from images with boxes: all routes together, their statistics, then the gate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dsnet.detection.config import DetectConfig
from dsnet.detection.evaluate import DetectionResult
from dsnet.detection.fssd import Detector
from dsnet.detection.gate import GateTraining
from dsnet.detection.learning import DetectorTraining
from dsnet.detection.pictures import Pictures, load_pictures, read_splits
from dsnet.detection.saved import Prepared, SavedDetector, detector_of
from dsnet.detection.voc import Problem
from dsnet.errors import DsnetError
from dsnet.models import Supernet, create_model
from dsnet.routes import evenly
from dsnet.routing.config import GateConfig
from dsnet.training.checkpoint import Checkpoint, load_checkpoint
from dsnet.training.folder import locked
from dsnet.training.interrupt import stop_on_signals
from dsnet.training.loop import Ending, Watch
from dsnet.training.run import pick_device
from dsnet.training.seeds import seeded
from dsnet.training.settings import from_plain, to_plain
from dsnet.training.transfer import start_from, trained_on

__all__ = ["PROBLEMS", "DetectionOutcome", "make_detector", "open_pictures", "train_detector"]

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
        found = make_detector(config, train, saved, folder)
        if config.gate.epochs:  # a wrong one would be told at the end else
            GateConfig(space=config.gate.space).routes(found.detector.network)
        training = DetectorTraining(config, found, train, folder, device, watch)
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
        space = found.detector.network.space
        routes = [space[at] for at in evenly(len(space), SHOWN)]
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


def _placed(pictures: Pictures, device: torch.device) -> Pictures:
    if device.type != "cuda":
        return pictures
    free, _ = torch.cuda.mem_get_info(device)
    return pictures.to(device) if pictures.images.nbytes < MEMORY * free else pictures


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


def make_detector(
    config: DetectConfig, train: Pictures, saved: Checkpoint | None, folder: Path
) -> SavedDetector:
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
