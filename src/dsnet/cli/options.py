"""Arguments that several commands take."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
from typing import Any, NamedTuple

from dsnet.data import SETS, ImageSet, LazySet, load
from dsnet.data.classes import in_classes_of
from dsnet.data.sets import Split
from dsnet.errors import DsnetError
from dsnet.models import Supernet, create_model, list_models
from dsnet.models.registry import model_entry
from dsnet.training import Checkpoint
from dsnet.training.checkpoint import load_classifier
from dsnet.training.run import pick_device

__all__ = [
    "OpenedRun",
    "add_run_arguments",
    "check_out",
    "image_size",
    "open_network",
    "open_run",
    "parse_settings",
    "positive",
]


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """``["norm=group", "num_classes=10"]`` → ``{"norm": "group", "num_classes": 10}``."""
    parsed = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.isidentifier():
            raise DsnetError(f"--set takes key=value, not {setting!r}")
        if key in ("name", "device", "dtype", "generator"):
            raise DsnetError(f"{key} is no model option; here --set takes what `dsnet models --json` lists")
        try:
            parsed[key] = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            parsed[key] = text
    return parsed


def check_out(path: Path | None, option: str = "--out") -> None:
    """Raises where a file could not be written to, before anything takes time."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise DsnetError(f"{option} takes a file in a folder that is there, not {path}")


def image_size(text: str) -> int | tuple[int, int]:
    """``224`` or ``224x192`` (height × width), for argparse."""
    sides = tuple(map(positive, text.split("x")))
    if len(sides) == 1:
        return sides[0]
    height, width = sides
    return height, width


image_size.__name__ = "image size"


def positive(text: str) -> int:
    """A positive integer, for argparse."""
    number = int(text)
    if not 1 <= number <= 2**31:
        raise ValueError(text)
    return number


positive.__name__ = "positive number"  # what argparse calls it in an error


def add_run_arguments(parser: argparse.ArgumentParser, split: str) -> None:
    """A run's folder, which of its checkpoints, and the data of a split."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, as `dsnet train` makes it")
    parser.add_argument(
        "--name",
        help="which of its checkpoints: gated, final, best, last (default: gated, else final, else last)",
    )
    parser.add_argument(
        "--data",
        help=f"{', '.join(SETS)}, or a folder with {split}/CLASS/*.jpg; the {split} split is used "
        "(default: what the run was trained on)",
    )
    parser.add_argument("--root", help="where named sets lie (default: as in the run, else DSNET_DATA)")
    parser.add_argument("--batch", type=positive, default=256, help="images at a time (default: 256)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (default: auto)")


class OpenedRun(NamedTuple):
    """A checkpoint, its network and the images of a split, on one device."""

    saved: Checkpoint
    model: Supernet
    images: ImageSet | LazySet
    data: str


def open_run(args: argparse.Namespace, split: Split) -> OpenedRun:
    """What the arguments of `add_run_arguments` name."""
    saved = load_classifier(args.run, args.name)
    model = saved.model()
    trained = _settings(saved)
    data = args.data or trained.get("name")
    if data is None:
        raise DsnetError(f"{args.run} does not say what it was trained on; name the data with --data")
    root, usual = args.root or trained.get("root"), model.geometry.image_size
    images = load(data, split, root=root, size=_trained_size(saved), default_size=usual)
    classes = model.head.classifier.out_features
    known = tuple(saved.data.get("classes", ()))
    if len(images.classes) > classes or (not known and len(images.classes) != classes):
        raise DsnetError(f"{data} has {len(images.classes)} classes, the network {classes}")
    if known:
        images = in_classes_of(images, known, "the network")
    device = pick_device(args.device)
    return OpenedRun(saved, model.to(device), images.to(device), data)


def _settings(saved: Checkpoint) -> dict[str, Any]:
    """The settings of the data that a run was trained on, as far as it says."""
    recipe = saved.data.get("recipe")
    return recipe.get("data", {}) if isinstance(recipe, dict) else {}


def _trained_size(saved: Checkpoint) -> int | None:
    """Side of the images that a run was trained on, where it says so."""
    known = saved.data.get("input")
    size = known.get("size") if isinstance(known, dict) else None
    return size or _settings(saved).get("size")


def open_network(network: str, settings: list[str]) -> tuple[Supernet, int | None]:
    """The network, and the image size it was trained at where a run says so."""
    if network in list_models("supernet"):  # a folder of the same name is ./NAME
        return create_model(network, **parse_settings(settings)), None
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
