"""A whole training run of a detector: all routes together, their statistics, then the gate."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from dsnet.core.checkpoint import Checkpoint
from dsnet.core.device import pick_device
from dsnet.core.files import write_text
from dsnet.core.formats import DETECTION_RESULTS
from dsnet.core.interrupt import stop_on_signals, stopped_status, terminable
from dsnet.core.schema import read_json
from dsnet.core.settings import to_plain
from dsnet.detection.data.dataset import Boxes, DetectionDataset
from dsnet.detection.data.summary import SplitCounts, count_split, describe_run, plural
from dsnet.detection.data.voc import FileProblem
from dsnet.detection.eval.evaluate import DetectionResult, evaluate_detector
from dsnet.detection.train._gate import DetectorGateTask
from dsnet.detection.train._task import DetectorTask, calibrate_detector_bn
from dsnet.detection.train.config import DetectionConfig, DetectionRunConfig, DetectorGateConfig
from dsnet.detection.train.setup import PROBLEMS, check_networks, make_detector, open_datasets
from dsnet.errors import DsnetError, printable
from dsnet.routes import Route, evenly_spaced
from dsnet.training.callbacks import Callback
from dsnet.training.loop import LoopConfig, RunStatus, TrainingLoop
from dsnet.training.run_dir import begin, locked, read_settings, write_config
from dsnet.training.stage2.config import GateConfig

__all__ = ["RESULTS", "DetectionOutcome", "train_detector"]

MAX_EVALUATED = 16  # routes that are evaluated at the end
RESULTS = "results.json"  # the file of a finished run with its figures
FREE = [  # settings that may differ when a run is resumed
    *(f"run.{field.name}" for field in fields(DetectionRunConfig) if field.name != "seed"),
    *(f"gate.{field.name}" for field in fields(DetectorGateConfig)),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionOutcome:
    """The results of a training run."""

    folder: Path
    status: RunStatus
    classes: tuple[str, ...]
    results: tuple[DetectionResult, ...] = ()  # of routes, then of the gate; empty if the run was stopped
    problems: tuple[FileProblem, ...] = ()
    tested: tuple[Path, ...] = ()  # the test images
    train: SplitCounts | None = None  # None: the run was finished before
    test: SplitCounts | None = None

    @property
    def done(self) -> bool:
        """Whether training, evaluation and gate training are finished."""
        return self.status.finished and bool(self.results)


def train_detector(
    config: DetectionConfig,
    folder: Path,
    *,
    resume: bool = False,
    callback: Callback | None = None,
    notice: Callable[[str], None] = lambda message: None,
) -> DetectionOutcome:
    """Train a detector into a folder.

    The checkpoint is ``last`` during training, ``final`` once it has exact statistics, and ``gated`` with a
    trained gate. A finished run that is resumed is left as it is.

    Args:
        config: Settings of the run.
        folder: Folder of the run.
        resume: Continue from the last checkpoint.
        callback: Observes training.
        notice: Gets a description of the run, and a line for each operation after training.

    Raises:
        DsnetError: The data, the network or the folder does not fit the settings.
    """
    callback = callback or Callback()
    if not config.data.root:
        raise DsnetError("where are the images? Give data.root: a folder in VOC's layout")
    device = pick_device(config.run.device)
    with locked(folder):
        names = ("last", "final", "gated")
        saved = begin(folder, config, resume=resume, warn=callback.on_message, names=names, free=FREE)
        if saved is None:
            check_networks(config)
        elif (finished := _finished(folder, config, saved, callback)) is not None:
            return finished
        train, test, problems = open_datasets(config, device, callback)
        detector = make_detector(config, train, saved, folder, device)
        if config.gate.epochs:  # raises now rather than after training
            GateConfig(space=config.gate.space).routes(detector.detector.network)
        task = DetectorTask(config, detector, train)
        loop = TrainingLoop(task, _loop_config(config), folder, callback=callback)
        if saved is not None:
            loop.restore(saved)
        (folder / RESULTS).unlink(missing_ok=True)  # of another gate
        write_config(folder, config)
        if problems:
            lines = (printable(f"{problem.file}: {problem.what}").replace("\n", " ") for problem in problems)
            write_text(folder / PROBLEMS, "".join(f"{line}\n" for line in lines))
        counts = count_split(train), count_split(test)
        notice(describe_run(config, *counts, routes=len(detector.detector.network.space)))
        with stop_on_signals(callback.on_message) as stop:  # later signals act at once: training is saved
            status = replace(loop.run(stop), signal=stop.signal)
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
                results = _finish(loop, task, test, notice)
        except KeyboardInterrupt as stopped:
            return replace(outcome, status=replace(status, signal=stopped_status(stopped) - 128))
        _write_results(folder, config, train.classes, results)
        return replace(outcome, results=tuple(results))


def _loop_config(config: DetectionConfig) -> LoopConfig:
    optim, run = config.optim, config.run
    return LoopConfig(
        epochs=optim.epochs, clip=optim.clip, log_every=run.log_every, save_minutes=run.save_minutes
    )


def _finish(
    loop: TrainingLoop, task: DetectorTask, test: DetectionDataset, notice: Callable[[str], None]
) -> list[DetectionResult]:
    """Compute statistics, evaluate routes, then train the gate and evaluate it."""
    config, detector, callback = task.config, task.detector, loop.callback
    space, images, batch = detector.network.space, len(task.train), config.optim.batch
    routes = [space[index] for index in evenly_spaced(len(space), MAX_EVALUATED)]
    count = min(config.data.calibration, images)
    notice(f"Statistics of {plural(len(space), 'route')}, from {plural(count, 'training image')}")
    batches = task.data.sample(count, batch, pass_number=0, first_draw=task.steps)
    seen = callback.progress(batches, -(-count // batch), "statistics: batch")
    calibrate_detector_bn(detector, (x for x, _ in seen))
    detector.eval()
    task.save(loop.folder, "final", step=task.steps, data=loop.data, resumable=False)

    def evaluate(routes: Sequence[Route | None]) -> Iterator[DetectionResult]:
        preprocessing = task.saved.preprocessing
        return evaluate_detector(
            detector, test, preprocessing, routes, batch=batch, progress=callback.progress
        )

    notice(f"Figures of {plural(len(routes), 'route')}, on {plural(len(test), 'test image')}")
    results = []
    for result in evaluate(routes):
        notice(f"route {result.route}: mAP {100 * result.mean['voc2007']:.1f} (VOC 2007)")
        results.append(result)
    if config.gate.epochs and len(routes) > 1:
        _train_gate(loop, task, notice)
        results += evaluate([None])
        notice(f"gate: mAP {100 * results[-1].mean['voc2007']:.1f} (VOC 2007)")
    return results


def _train_gate(loop: TrainingLoop, task: DetectorTask, notice: Callable[[str], None]) -> None:
    """Train the gate on augmented training images, and save the detector as ``gated``."""
    config, gate, images = task.config, task.config.gate, len(task.train)

    def epoch(number: int) -> Iterator[tuple[torch.Tensor, Boxes]]:
        batches = task.data.sample(images, gate.batch, pass_number=1 + number, first_draw=task.steps)
        return loop.callback.progress(batches, stage2.epoch_steps, f"gate, epoch {number + 1}: batch")

    stage2 = DetectorGateTask(config, task.saved, images, epoch, task.precision)
    notice(f"The gate, between {plural(len(stage2.routes), 'route')}: {plural(gate.epochs, 'epoch')}")
    settings = LoopConfig(epochs=gate.epochs, log_every=stage2.epoch_steps, save_minutes=None)
    callback = _GateProgress(gate.epochs, stage2.epoch_steps, notice)
    TrainingLoop(stage2, settings, loop.folder / "gated.stage2", callback=callback).run()
    task.detector.requires_grad_(True)
    data = {**loop.data, "gate": to_plain(gate)}
    task.save(loop.folder, "gated", step=task.steps, data=data, resumable=False)


class _GateProgress(Callback):
    """Reports the mean losses of each epoch."""

    def __init__(self, epochs: int, epoch_steps: int, notice: Callable[[str], None]) -> None:
        self.epochs, self.epoch_steps, self.notice = epochs, epoch_steps, notice

    def on_log(self, step: int, values: Mapping[str, float]) -> None:
        """Report the losses of the epoch that has ended."""
        losses = ", ".join(f"{name} {values[name]:.3f}" for name in ("target", "complexity", "sgs"))
        self.notice(f"gate, epoch {step // self.epoch_steps} of {self.epochs}: {losses}")


def _finished(
    folder: Path, config: DetectionConfig, saved: Checkpoint, callback: Callback
) -> DetectionOutcome | None:
    """Return the outcome of a run with nothing left to do; other settings of the gate are left to do."""
    steps = saved.data.get("steps")
    if saved.data["step"] != steps or not (folder / RESULTS).is_file():
        return None
    if read_settings(folder, DetectionConfig).gate != config.gate:
        return None
    try:
        plain = read_json(folder / RESULTS, DETECTION_RESULTS)
    except DsnetError as error:  # writing was interrupted
        callback.on_message(f"{error}: the figures are made again")
        return None
    return DetectionOutcome(
        folder=folder,
        status=RunStatus(step=steps, steps=steps),
        classes=tuple(plain["classes"]),
        results=tuple(DetectionResult.from_dict(result) for result in plain["results"]),
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
