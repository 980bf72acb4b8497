"""The networks, runs and data that the arguments of a command name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from dsnet.core.checkpoint import Checkpoint
from dsnet.core.device import pick_device
from dsnet.core.settings import parse_assignments
from dsnet.data import InMemoryDataset, LazyDataset, load_dataset
from dsnet.data.loading import map_classes
from dsnet.data.registry import Split
from dsnet.errors import DsnetError
from dsnet.models import Supernet, create_model, list_models
from dsnet.models.loading import build_network, load_classifier
from dsnet.models.registry import TIMM, model_entry

__all__ = [
    "OpenedRun",
    "chosen_weights",
    "model_options",
    "open_network",
    "open_run",
    "run_text",
]


def run_text(args: argparse.Namespace) -> str:
    """Return the run and checkpoint of the arguments, as on the command line."""
    return f"{args.run} --name {args.name}" if args.name else str(args.run)


def chosen_weights(args: argparse.Namespace, model: str) -> str | None:
    """Return the pretrained weights that ``--weights`` names: a file, ``timm``, or None for random ones.

    Raises:
        DsnetError: ``--weights-by-order`` is given without a file.
    """
    weights: str | None = args.weights
    if weights is None:
        weights = "timm" if model.startswith(TIMM) else None
    elif weights.lower() == "none":
        weights = None
    if args.weights_by_order and weights in (None, "timm"):
        raise DsnetError("--weights-by-order is for a file of weights: give --weights FILE")
    return weights


def model_options(settings: list[str]) -> dict[str, Any]:
    """Parse ``--set`` of a command that takes a model by name: the options of `create_model`."""
    options = parse_assignments(settings)
    for key in options:
        if key in ("name", "device", "dtype", "generator"):
            raise DsnetError(f"{key} is no model option; here --set takes what `dsnet models --json` lists")
    return options


class OpenedRun(NamedTuple):
    """A checkpoint, its network and the images of a split, on one device."""

    saved: Checkpoint
    model: Supernet
    images: InMemoryDataset | LazyDataset
    data: str


def open_run(args: argparse.Namespace, split: Split) -> OpenedRun:
    """Open the checkpoint, network and images that `run`, `name`, `data` and `root` of the arguments name."""
    saved = load_classifier(args.run, args.name)
    model = build_network(saved)
    trained = _data_settings(saved)
    data = args.data or trained.get("name")
    if data is None:
        raise DsnetError(f"{args.run} does not say what it was trained on; name the data with --data")
    ratio: float = (saved.data.get("input") or trained).get("crop_ratio", 1.0)  # 1 in runs of early versions
    images = load_dataset(
        data,
        split,
        root=args.root or trained.get("root"),
        size=_trained_size(saved),
        default_size=model.input_spec.image_size,
        ratio=ratio,
    )
    classes = model.head.classifier.out_features
    names = tuple(saved.data.get("classes", ()))
    if len(images.classes) > classes or (not names and len(images.classes) != classes):
        raise DsnetError(f"{data} has {len(images.classes)} classes, the network {classes}")
    if names:
        images = map_classes(images, names, "the network")
    device = pick_device(args.device)
    return OpenedRun(saved, model.to(device), images.to(device), data)


def open_network(args: argparse.Namespace) -> tuple[Supernet, int | tuple[int, int] | None]:
    """Return the network that ``MODEL|RUN`` names and the image size to use (None: the model's default)."""
    network: str = args.network
    if network in list_models("supernet") or network.startswith(TIMM):  # a folder is ./NAME
        return create_model(network, **model_options(args.set)), args.image_size
    path = Path(network)
    if path.is_dir():
        if args.set:
            raise DsnetError(f"--set is for a model by name; {path} is a run and has its options already")
        saved = load_classifier(path)
        return build_network(saved), args.image_size or _trained_size(saved)
    if path.parent != Path():
        raise DsnetError(f"there is no folder {path}; a run is the folder that `dsnet train` made")
    try:
        model_entry(network)
    except DsnetError as error:
        raise DsnetError(f"{error} (and there is no folder of that name)") from None
    raise DsnetError(f"{network} is a static network: it has no routes; `dsnet models` lists the supernets")


def _data_settings(saved: Checkpoint) -> dict[str, Any]:
    """Return the settings of the training data; empty if the checkpoint has none."""
    recipe = saved.data.get("recipe")
    data = recipe.get("data") if isinstance(recipe, dict) else None
    return data if isinstance(data, dict) else {}


def _trained_size(saved: Checkpoint) -> int | None:
    """Return the side of the training images, if the checkpoint has it."""
    size = (saved.data.get("input") or {}).get("size")
    return size or _data_settings(saved).get("size")
