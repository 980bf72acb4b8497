"""What a detector's training starts from: the network, the detector and the datasets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from dsnet.core.checkpoint import Checkpoint
from dsnet.core.seeding import seeded
from dsnet.detection.data.dataset import DetectionDataset, load_detection_dataset, read_splits
from dsnet.detection.data.summary import batch_too_large, report_problems
from dsnet.detection.data.transforms import Preprocessing
from dsnet.detection.data.voc import FileProblem
from dsnet.detection.io import SavedDetector, detector_from_checkpoint
from dsnet.detection.model.fssd import Detector, incompatibility
from dsnet.detection.train.config import DetectionConfig
from dsnet.errors import DsnetError
from dsnet.models import Supernet, create_model, list_models
from dsnet.models.loading import build_network
from dsnet.training.callbacks import Callback
from dsnet.training.transfer import checkpoint_of, start_from, trained_on

__all__ = ["PROBLEMS", "check_networks", "create_network", "make_detector", "open_datasets"]

MAX_GPU_SHARE = 0.4  # of a GPU's free memory that images may take
PROBLEMS = "problems.txt"  # the file of a run that lists problems with files


def create_network(config: DetectionConfig, generator: torch.Generator | None = None) -> Supernet:
    """Create the network with weights drawn from a generator; without one, on the meta device."""
    device = "meta" if generator is None else None
    network = create_model(config.model, device=device, generator=generator, **config.options)
    if not isinstance(network, Supernet):
        raise DsnetError(f"{config.model} is a static network; `dsnet models` lists the supernets")
    return network


def check_networks(config: DetectionConfig) -> None:
    """Raise an error if the network, or the one to start from, cannot carry the detector."""
    if (reason := incompatibility(create_network(config), config.table)) is not None:
        raise DsnetError(f"{config.model} cannot carry this detector: {reason}; {_compatible(config)}")
    if config.start is None:
        return
    start = build_network(checkpoint_of(config.start))
    if (reason := incompatibility(start, config.table)) is not None:
        raise DsnetError(
            f"start={config.start} holds {start.name}, which cannot carry this detector: {reason}; "
            f"{_compatible(config)}. Train one of them with `dsnet train`, or begin with none: start=none"
        )


def _compatible(config: DetectionConfig) -> str:
    configs = (replace(config, model=name, options={}) for name in list_models("supernet"))
    names = [c.model for c in configs if incompatibility(create_network(c), config.table) is None]
    return f"these can: {', '.join(names) or 'none'}"


def make_detector(
    config: DetectionConfig,
    train: DetectionDataset,
    saved: Checkpoint | None,
    folder: Path,
    device: torch.device,
) -> SavedDetector:
    """Build the detector of a checkpoint, or a new one, with the weights of ``config.start`` if it is set."""
    result = _new_detector(config, train) if saved is None else detector_from_checkpoint(saved, folder)
    result.detector.to(device)
    if config.run.channels_last:
        result.detector.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return result


def _new_detector(config: DetectionConfig, train: DetectionDataset) -> SavedDetector:
    generator = seeded(config.run.seed, "weights")
    network = create_network(config, generator)
    mean, std = train.statistics()
    if config.start is not None:
        spec = trained_on(start_from(network, config.start), config.start)
        mean, std = tuple(spec["mean"]), tuple(spec["std"])
    detector = Detector(network, len(train.classes), config.table, generator=generator)
    preprocessing = Preprocessing(config.data.size, mean, std)
    return SavedDetector(detector, train.classes, preprocessing, Checkpoint(tensors={}, data={}))


def open_datasets(
    config: DetectionConfig, device: torch.device, callback: Callback
) -> tuple[DetectionDataset, DetectionDataset, tuple[FileProblem, ...]]:
    """Read training and test images, onto the device if there is room; also return problems with files."""
    data = config.data
    train = read_splits(data.root, data.train, data.classes)
    annotations = train, read_splits(data.root, data.test, train.classes)
    problems = tuple(problem for split in annotations for problem in split.problems)
    datasets = []
    for split, side in zip(annotations, (data.stored_size, data.size), strict=True):
        dataset, damaged = load_detection_dataset(split, side, callback.progress)
        problems += damaged
        datasets.append(_on_device(dataset, device))
    report_problems(problems, f"{PROBLEMS} of the run lists them", callback.on_message)
    if shared := set(datasets[0].paths) & set(datasets[1].paths):
        callback.on_message(f"{len(shared)} images are in both splits, as {min(shared)}: figures mean little")
    for dataset, name in zip(datasets, (data.train, data.test), strict=True):
        if bool((dataset.boxes.classes < 0).all()):
            raise DsnetError(f"{data.root}, {name}: there is no box that is not marked as difficult")
    if len(datasets[0]) < config.optim.batch:
        raise DsnetError(batch_too_large(len(datasets[0]), config.optim.batch))
    return datasets[0], datasets[1], problems


def _on_device(dataset: DetectionDataset, device: torch.device) -> DetectionDataset:
    if device.type != "cuda":
        return dataset
    free, _ = torch.cuda.mem_get_info(device)
    return dataset.to(device) if dataset.images.nbytes < MAX_GPU_SHARE * free else dataset
