"""A detector from images with boxes: all routes together, their statistics, then the gate."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dsnet.core.checkpoint import Checkpoint, has_last, load_checkpoint
from dsnet.core.device import pick_device
from dsnet.core.files import write_text
from dsnet.core.formats import DETECTION_RESULTS
from dsnet.core.interrupt import stop_on_signals, stopped_status, terminable
from dsnet.core.schema import read_json
from dsnet.core.seeding import seeded
from dsnet.core.settings import to_plain
from dsnet.detection.data.dataset import DetectionDataset, load_detection_dataset, read_splits
from dsnet.detection.data.prepare import Preprocessing
from dsnet.detection.data.summary import SplitCounts, batch_too_large, count_split, describe_run, plural
from dsnet.detection.data.voc import FileProblem
from dsnet.detection.eval.evaluate import DetectionResult
from dsnet.detection.io import SavedDetector, detector_from_checkpoint
from dsnet.detection.model.fssd import Detector, incompatibility
from dsnet.detection.train.config import DetectionConfig
from dsnet.detection.train.gate import DetectorGateTask
from dsnet.detection.train.task import DetectorTask
from dsnet.errors import DsnetError, printable
from dsnet.models import Supernet, create_model, list_models
from dsnet.models.loading import build_network
from dsnet.routes import evenly_spaced
from dsnet.training.callbacks import Callback
from dsnet.training.loop import RunStatus
from dsnet.training.run_dir import locked, read_plain, settings_of, write_config
from dsnet.training.stage2.config import GateConfig
from dsnet.training.transfer import checkpoint_of, start_from, trained_on

__all__ = [
    "PROBLEMS",
    "RESULTS",
    "DetectionOutcome",
    "check_networks",
    "make_detector",
    "open_datasets",
    "planned_network",
    "report_problems",
    "train_detector",
]

SHOWN = 16  # routes that are evaluated at the end, at most
TOLD = 5  # problems with files that are told one by one
MEMORY = 0.4  # of a GPU's free memory that images may take
PROBLEMS = "problems.txt"  # of a run: what is wrong with files
RESULTS = "results.json"  # of a run that is finished


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionOutcome:
    """What a run came to."""

    folder: Path
    status: RunStatus
    classes: tuple[str, ...]
    results: tuple[DetectionResult, ...] = ()  # routes, then the gate; none where the run was stopped
    problems: tuple[FileProblem, ...] = ()
    tested: tuple[Path, ...] = ()  # the test images
    train: SplitCounts | None = None  # none: the run was finished before
    test: SplitCounts | None = None

    @property
    def done(self) -> bool:
        """Whether all has come to its end, the gate too."""
        return self.status.finished and bool(self.results)


def train_detector(
    config: DetectionConfig,
    folder: Path,
    *,
    resume: bool = False,
    callback: Callback | None = None,
    said: Callable[[str], None] = lambda message: None,
) -> DetectionOutcome:
    """Trains into a folder: ``last`` while it trains, ``final`` with statistics, ``gated`` with a gate.

    ``said`` hears what is about to be trained, and when statistics, figures and the gate begin. A finished
    run that is resumed is left as it is.
    """
    callback = callback or Callback()
    if not config.data.root:
        raise DsnetError("where are the images? Give data.root: a folder in VOC's layout")
    device = pick_device(config.run.device)
    with locked(folder):
        saved = _begin(folder, config, resume=resume, callback=callback)
        if saved is not None and (finished := _finished(folder, config, saved, callback)) is not None:
            return finished
        if saved is None:
            check_networks(config)
        train, test, problems = open_datasets(config, device, callback)
        found = make_detector(config, train, saved, folder)
        if config.gate.epochs:  # a wrong one would be told at the end else
            GateConfig(space=config.gate.space).routes(found.detector.network)
        training = DetectorTask(config, found, train, folder, device, callback)
        if saved is not None:
            training.restore(saved)
        (folder / RESULTS).unlink(missing_ok=True)  # what is there is not finished
        write_config(folder, config)
        if problems:
            lines = (printable(f"{problem.file}: {problem.what}").replace("\n", " ") for problem in problems)
            write_text(folder / PROBLEMS, "".join(f"{line}\n" for line in lines))
        counts = count_split(train), count_split(test)
        said(describe_run(config, *counts, routes=len(found.detector.network.space)))
        with stop_on_signals(
            callback.on_message
        ) as request:  # later signals act at once: what was trained is saved
            status = training.run(request)
        outcome = DetectionOutcome(
            folder=folder,
            status=status,
            classes=train.classes,
            problems=problems,
            tested=test.paths,
            train=counts[0],
            test=counts[1],
        )
        if not status.finished or status.signal is not None:
            return outcome
        try:
            with terminable():
                results = _finish(config, training, test, callback, said)
        except KeyboardInterrupt as stopped:
            return replace(outcome, status=replace(status, signal=stopped_status(stopped) - 128))
        _write_results(folder, config, train.classes, results)
        return replace(outcome, results=tuple(results))


def _finish(
    config: DetectionConfig,
    training: DetectorTask,
    test: DetectionDataset,
    callback: Callback,
    said: Callable[[str], None],
) -> list[DetectionResult]:
    """What comes after training: statistics, figures of routes, the gate and its figures."""
    space, images = training.detector.network.space, len(training.train)
    routes = [space[at] for at in evenly_spaced(len(space), SHOWN)]
    said(
        f"Statistics of {plural(len(space), 'route')}, from "
        f"{plural(min(config.data.calibration, images), 'training image')}"
    )
    training.calibrate()
    training.save("final")
    said(f"Figures of {plural(len(routes), 'route')}, on {plural(len(test), 'test image')}")
    results = []
    for result in training.evaluate(test, routes):
        said(f"route {result.route}: mAP {100 * result.mean['voc2007']:.1f} (VOC 2007)")
        results.append(result)
    if config.gate.epochs and len(routes) > 1:
        gate = DetectorGateTask(config, training.found, training.precision)
        said(f"The gate, between {plural(len(gate.routes), 'route')}: {plural(config.gate.epochs, 'epoch')}")
        gate.train(training.epoch_for_gate, -(-images // config.gate.batch), callback, said)
        training.save("gated", {"gate": to_plain(config.gate)})
        results += training.evaluate(test, [None])
        said(f"gate: mAP {100 * results[-1].mean['voc2007']:.1f} (VOC 2007)")
    return results


def _finished(
    folder: Path, config: DetectionConfig, saved: Checkpoint, callback: Callback
) -> DetectionOutcome | None:
    """What a run came to that has nothing left to do; another gate would be."""
    steps = saved.data.get("steps")
    if saved.data["step"] != steps or not (folder / RESULTS).is_file():
        return None
    if to_plain(_read_config(folder))["gate"] != to_plain(config)["gate"]:
        return None
    try:
        plain = read_json(folder / RESULTS, DETECTION_RESULTS)
    except DsnetError as error:  # half a file: it is made again
        callback.on_message(f"{error}: the figures are made again")
        return None
    results = tuple(DetectionResult.from_dict(result) for result in plain["results"])
    classes = tuple(plain["classes"])
    return DetectionOutcome(
        folder=folder, status=RunStatus(step=steps, steps=steps), classes=classes, results=results
    )


def open_datasets(
    config: DetectionConfig, device: torch.device, callback: Callback
) -> tuple[DetectionDataset, DetectionDataset, tuple[FileProblem, ...]]:
    """Training and test images, on the device if there is room; and what is wrong with files."""
    data = config.data
    first = read_splits(data.root, data.train, data.classes)
    both = [first, read_splits(data.root, data.test, first.classes)]
    problems = tuple(problem for part in both for problem in part.problems)
    found = []
    for part, side in zip(both, (data.stored_size, data.size), strict=True):
        pictures, damaged = load_detection_dataset(part, side, callback.progress)
        problems += damaged
        found.append(_placed(pictures, device))
    report_problems(problems, f"{PROBLEMS} of the run lists them", callback.on_message)
    shared = set(found[0].paths) & set(found[1].paths)
    if shared:
        callback.on_message(
            f"{len(shared)} images are in both splits, as {sorted(shared)[0]}: figures mean little"
        )
    for pictures, split in zip(found, (data.train, data.test), strict=True):
        if bool((pictures.boxes.classes < 0).all()):
            raise DsnetError(f"{data.root}, {split}: there is no box that is not marked as difficult")
    if len(found[0]) < config.optim.batch:
        raise DsnetError(batch_too_large(len(found[0]), config.optim.batch))
    return found[0], found[1], problems


def report_problems(problems: Sequence[FileProblem], rest: str, told: Callable[[str], None]) -> None:
    """The first of them, and where the rest is."""
    for problem in problems[:TOLD]:
        told(f"{problem.file}: {problem.what}")
    if len(problems) > TOLD:
        told(f"and {len(problems) - TOLD} more problems with files: {rest}")


def _placed(pictures: DetectionDataset, device: torch.device) -> DetectionDataset:
    if device.type != "cuda":
        return pictures
    free, _ = torch.cuda.mem_get_info(device)
    return pictures.to(device) if pictures.images.nbytes < MEMORY * free else pictures


def _begin(folder: Path, config: DetectionConfig, *, resume: bool, callback: Callback) -> Checkpoint | None:
    kept = [name for name in ("last", "final", "gated") if (folder / name).is_file()]
    if "last" not in kept and has_last(folder):  # the file that names it was lost
        kept.insert(0, "last")
    if not resume:
        if kept:
            raise DsnetError(
                f"{folder} holds a run already: go on with it (--resume) or choose another folder"
            )
        return None
    if "last" not in kept:
        callback.on_message(f"there is no checkpoint in {folder} to go on from: starting anew")
        return None
    before, now = to_plain(_read_config(folder)), to_plain(config)
    changed = [key for key in now if key not in ("run", "gate") and before[key] != now[key]]
    changed += ["run.seed"] * (before["run"]["seed"] != now["run"]["seed"])
    if changed:
        raise DsnetError(f"{folder} was started with other settings of {', '.join(changed)}")
    return load_checkpoint(folder, "last")


def _read_config(folder: Path) -> DetectionConfig:
    path = folder / "recipe.json"
    return settings_of(DetectionConfig, read_plain(path), path)


def planned_network(config: DetectionConfig) -> Supernet:
    """The network of a run, without weights."""
    network = create_model(config.model, device="meta", **config.options)
    if not isinstance(network, Supernet):
        raise DsnetError(f"{config.model} is a static network; `dsnet models` lists the supernets")
    return network


def check_networks(config: DetectionConfig) -> None:
    """Raises where the network, or the one to start from, cannot carry the detector."""
    network = planned_network(config)
    if (why := incompatibility(network, config.table)) is not None:
        raise DsnetError(f"{config.model} cannot carry this detector: {why}; {_fit(config)}")
    if config.start is None:
        return
    theirs = build_network(checkpoint_of(config.start))
    if (why := incompatibility(theirs, config.table)) is not None:
        raise DsnetError(
            f"start={config.start} holds {theirs.name}, which cannot carry this detector: {why}; "
            f"{_fit(config)}. Train one of them with `dsnet train`, or begin with none: start=none"
        )


def _fit(config: DetectionConfig) -> str:
    """The networks that can carry the detector, in words."""
    found = []
    for name in list_models("supernet"):
        network = create_model(name, device="meta")
        if isinstance(network, Supernet) and incompatibility(network, config.table) is None:
            found.append(name)
    return f"these can: {', '.join(found) or 'none'}"


def make_detector(
    config: DetectionConfig, train: DetectionDataset, saved: Checkpoint | None, folder: Path
) -> SavedDetector:
    """A run's own, or one that begins: with the weights of a classifier, or with none."""
    if saved is not None:
        return detector_from_checkpoint(saved, folder)
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
        detector, train.classes, Preprocessing(config.data.size, mean, std), Checkpoint(tensors={}, data={})
    )


def _write_results(
    folder: Path, config: DetectionConfig, classes: Sequence[str], results: Sequence[DetectionResult]
) -> None:
    plain = {
        "model": config.model,
        "classes": list(classes),
        "size": config.data.size,
        "results": [result.to_dict() for result in results],
    }
    write_text(folder / RESULTS, json.dumps(plain, indent=2) + "\n")
