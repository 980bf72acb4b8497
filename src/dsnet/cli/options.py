"""What arguments that several commands take stand for."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from dsnet.core.device import pick_device
from dsnet.core.run_lock import locked_outputs
from dsnet.core.settings import parse_assignments
from dsnet.data import InMemoryDataset, LazyDataset, load_dataset
from dsnet.data.class_mapping import map_classes
from dsnet.data.registry import Split
from dsnet.errors import DsnetError
from dsnet.models import Supernet, create_model, list_models
from dsnet.models.loading import load_classifier
from dsnet.models.registry import model_entry
from dsnet.training import Checkpoint

__all__ = [
    "OpenedRun",
    "check_out",
    "locking",
    "open_network",
    "open_run",
    "model_options",
]


Command = Callable[[argparse.Namespace], int]


def model_options(settings: list[str]) -> dict[str, Any]:
    """Parse ``--set`` of a command that takes a model by name: the options of `create_model`."""
    options = parse_assignments(settings)
    for key in options:
        if key in ("name", "device", "dtype", "generator"):
            raise DsnetError(f"{key} is no model option; here --set takes what `dsnet models --json` lists")
    return options


def locking(*options: str) -> Callable[[Command], Command]:
    """Makes a command hold the lock of every run that the files of these options lie in."""

    def wrap(command: Command) -> Command:
        @functools.wraps(command)
        def run(args: argparse.Namespace) -> int:
            with locked_outputs(*(getattr(args, option) for option in options)):
                return command(args)

        return run

    return wrap


def check_out(path: Path | None, option: str = "--out") -> None:
    """Raises where a file could not be written to, before anything takes time."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise DsnetError(f"{option} takes a file in a folder that is there, not {path}")


class OpenedRun(NamedTuple):
    """A checkpoint, its network and the images of a split, on one device."""

    saved: Checkpoint
    model: Supernet
    images: InMemoryDataset | LazyDataset
    data: str


def open_run(args: argparse.Namespace, split: Split) -> OpenedRun:
    """Open the checkpoint, network and images that `run`, `name`, `data` and `root` of the arguments name."""
    saved = load_classifier(args.run, args.name)
    model = saved.model()
    trained = _settings(saved)
    data = args.data or trained.get("name")
    if data is None:
        raise DsnetError(f"{args.run} does not say what it was trained on; name the data with --data")
    root, usual = args.root or trained.get("root"), model.input_spec.image_size
    size, ratio = _trained_size(saved), _trained_ratio(saved)
    images = load_dataset(data, split, root=root, size=size, default_size=usual, ratio=ratio)
    classes = model.head.classifier.out_features
    known = tuple(saved.data.get("classes", ()))
    if len(images.classes) > classes or (not known and len(images.classes) != classes):
        raise DsnetError(f"{data} has {len(images.classes)} classes, the network {classes}")
    if known:
        images = map_classes(images, known, "the network")
    device = pick_device(args.device)
    return OpenedRun(saved, model.to(device), images.to(device), data)


def _settings(saved: Checkpoint) -> dict[str, Any]:
    """The settings of the data that a run was trained on, as far as it says."""
    recipe = saved.data.get("recipe")
    data = recipe.get("data") if isinstance(recipe, dict) else None
    return data if isinstance(data, dict) else {}


def _trained_size(saved: Checkpoint) -> int | None:
    """Side of the images that a run was trained on, where it says so."""
    known = saved.data.get("input")
    size = known.get("size") if isinstance(known, dict) else None
    return size or _settings(saved).get("size")


def _trained_ratio(saved: Checkpoint) -> float:
    """What a run's images are of what they are cut from; 1 where it does not say, as before this was set."""
    known = saved.data.get("input")
    ratio: float = (known if isinstance(known, dict) else _settings(saved)).get("crop_ratio", 1.0)
    return ratio


def open_network(network: str, settings: list[str]) -> tuple[Supernet, int | None]:
    """The network, and the image size it was trained at where a run says so."""
    if network in list_models("supernet"):  # a folder of the same name is ./NAME
        return create_model(network, **model_options(settings)), None
    path = Path(network)
    if path.is_dir():
        if settings:
            raise DsnetError(f"--set is for a model by name; {path} is a run and has its options already")
        saved = load_classifier(path)
        return saved.model(), _trained_size(saved)
    if path.parent != Path():
        raise DsnetError(f"there is no folder {path}; a run is the folder that `dsnet train` made")
    try:
        model_entry(network)
    except DsnetError as error:
        raise DsnetError(f"{error} (and there is no folder of that name)") from None
    raise DsnetError(f"{network} is a static network: it has no routes; `dsnet models` lists the supernets")
