"""Datasets in the layout of Pascal VOC. All annotations are read and checked before training starts.

    ROOT/JPEGImages/NAME.jpg    ROOT/Annotations/NAME.xml    ROOT/ImageSets/Main/SPLIT.txt

A problem with a file is reported with the file's path. Unusable images are left out and counted. An
unknown class is an error.
"""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsnet.core.files import open_regular
from dsnet.data.dataset import check_class_names
from dsnet.data.decode import DecodeError, open_header
from dsnet.data.readers.public_datasets import VOC_CLASSES
from dsnet.detection.eval.metrics import GroundTruth
from dsnet.errors import DsnetError, printable, shorten

__all__ = [
    "VOC_CLASSES",
    "AnnotatedImage",
    "FileProblem",
    "VocAnnotations",
    "displayed_size",
    "read_voc",
    "size_mismatch",
]

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


class FileProblem(NamedTuple):
    """A problem with a file, and its consequence."""

    file: Path
    what: str


class AnnotatedImage(NamedTuple):
    """An image file, its size and its boxes in pixels."""

    image: Path
    width: int
    height: int
    truth: GroundTruth


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VocAnnotations:
    """The usable images of a dataset and their boxes."""

    classes: tuple[str, ...]
    items: tuple[AnnotatedImage, ...]
    problems: tuple[FileProblem, ...] = ()
    listed: int = 0  # images in the split, including unusable ones


def read_voc(
    root: Path | str, split: str | None = None, *, classes: Sequence[str] | None = None
) -> VocAnnotations:
    """Read the annotations of a folder.

    Args:
        root: A folder in VOC's layout.
        split: A file of ImageSets/Main without its suffix; by default all annotations are read.
        classes: Class names in order; by default those of the annotations, sorted.

    Raises:
        DsnetError: The folder or split does not exist, no image is usable, or a class is not in the list.
    """
    root = Path(root)
    where = root if split is None else f"{root}, {split}"
    problems: list[FileProblem] = []
    names = _list_names(root, split, problems)
    files = [file for name in names if (file := _read_file(root, name, problems)) is not None]
    if not files:
        first = f"; {problems[0].file}: {problems[0].what}" if problems else ""
        raise DsnetError(f"no image of {where} can be used{first}")
    present = sorted({label for file in files for label in file.labels})
    if not present:
        raise DsnetError(f"no image of {where} has a box")
    classes = tuple(present if classes is None else classes)
    check_class_names(str(where), classes)
    if len(set(classes)) != len(classes):
        raise DsnetError(f"class names must differ: {printable(', '.join(classes), 1000)}")
    indices = {name: index for index, name in enumerate(classes)}
    items = []
    for file in files:
        for label in file.labels:
            if label not in indices:
                raise DsnetError(
                    f"{file.path}: class {shorten(label)} is not in the list: "
                    f"{printable(', '.join(classes), 1000)}"
                )
        labels = np.array([indices[label] for label in file.labels], dtype=np.int64)
        items.append(file.image._replace(truth=replace(file.image.truth, classes=labels)))
    return VocAnnotations(classes=classes, items=tuple(items), problems=tuple(problems), listed=len(names))


def _list_names(root: Path, split: str | None, problems: list[FileProblem]) -> list[str]:
    folder = root / "Annotations"
    if not folder.is_dir():
        raise DsnetError(
            f"{root} is no folder in VOC's layout: it needs Annotations/*.xml, JPEGImages and, for a split, "
            "ImageSets/Main/SPLIT.txt"
        )
    if split is None:
        return sorted(path.stem for path in folder.glob("*.xml"))
    path = root / "ImageSets" / "Main" / f"{split}.txt"
    if not path.is_file():
        available = printable(", ".join(sorted(path.stem for path in path.parent.glob("*.txt"))), 500)
        raise DsnetError(f"{root} has no split {shorten(split)}; possible: {available or 'none'}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DsnetError(f"{path} is not a text file: {error}") from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # Lists of single classes have a number after each name. A name may also contain spaces.
    # `os.path.isfile` raises for none of them, `Path.is_file` for one that is too long.
    names = [line if os.path.isfile(folder / f"{line}.xml") else line.split()[0] for line in lines]
    problems += [
        FileProblem(path, f"names {name} {count} times; it counts once")
        for name, count in Counter(names).items()
        if count > 1
    ]
    return list(dict.fromkeys(names))


class _AnnotationFile(NamedTuple):
    path: Path
    image: AnnotatedImage  # its classes are still to be set
    labels: list[str]


class _Object(NamedTuple):
    label: str
    corners: NDArray[np.float64]
    difficult: bool


def _read_file(root: Path, name: str, problems: list[FileProblem]) -> _AnnotationFile | None:
    path = root / "Annotations" / f"{name}.xml"
    try:
        with open_regular(path) as file:
            tree = ET.parse(file).getroot()
        width, height = (int(float(_text(tree, f"size/{side}"))) for side in ("width", "height"))
        objects = [_read_object(entry) for entry in tree.iter("object")]
    except (OSError, ET.ParseError, ValueError, LookupError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {reason}"
        problems.append(FileProblem(path, f"{why}; the image is left out"))
        return None
    suffixes = (*SUFFIXES, *map(str.upper, SUFFIXES))
    image = next((p for s in suffixes if (p := root / "JPEGImages" / f"{name}{s}").is_file()), None)
    if image is None or width < 1 or height < 1:
        what = "has no image in JPEGImages" if image is None else f"says that the image is {width} × {height}"
        problems.append(FileProblem(path, f"{what}; it is left out"))
        return None
    if (mismatch := size_mismatch(displayed_size(image), width, height)) is not None:
        problems.append(FileProblem(image, f"{mismatch}; the image is left out"))
        return None
    kept = _clip_boxes(path, objects, width, height, problems)
    if not kept:
        problems.append(FileProblem(path, "has no box; the image is kept"))
    boxes = np.array([item.corners for item in kept], dtype=np.float64).reshape(-1, 4)
    difficult = np.array([item.difficult for item in kept], dtype=bool)
    truth = GroundTruth(boxes, np.zeros(len(kept), dtype=np.int64), difficult)
    return _AnnotationFile(path, AnnotatedImage(image, width, height, truth), [item.label for item in kept])


def _clip_boxes(
    path: Path, objects: Sequence[_Object], width: int, height: int, problems: list[FileProblem]
) -> list[_Object]:
    """Clip boxes to the image, and leave out those without area."""
    kept = []
    for item in objects:
        clipped = np.clip(item.corners, 0, [width, height, width, height])
        if (clipped[2:] <= clipped[:2]).any():
            what = f"a box of {item.label} has no area in the image; the box is left out"
            problems.append(FileProblem(path, what))
            continue
        if np.abs(clipped - item.corners).max() > 1:  # one pixel comes from counting from 0 or from 1
            what = f"a box of {item.label} lies partly outside the image; it is cut"
            problems.append(FileProblem(path, what))
        kept.append(item._replace(corners=clipped))
    return kept


def displayed_size(image: Path) -> tuple[int, int] | None:
    """Return the width and height that an image is displayed at, by its header; None: it cannot be read."""
    try:
        with open_header(str(image)) as opened:
            rotated = opened.getexif().get(0x0112, 1) in (5, 6, 7, 8)  # the EXIF tag Orientation
            width, height = opened.size
    except DecodeError:
        return None
    return (height, width) if rotated else (width, height)


def size_mismatch(displayed: tuple[int, int] | None, width: int, height: int) -> str | None:
    """Describe how an image's size differs from its annotation's; None: it does not, or it is unknown."""
    if displayed is None or displayed == (width, height):
        return None
    if displayed == (height, width):
        return (
            f"it is shown turned (EXIF), as {height} × {width} pixels, and its boxes are for "
            f"{width} × {height}: turn the file itself or take the tag off"
        )
    return f"it has {displayed[0]} × {displayed[1]} pixels, not {width} × {height} as its boxes say"


def _read_object(entry: ET.Element) -> _Object:
    left, top, right, bottom = (float(_text(entry, f"bndbox/{n}")) for n in ("xmin", "ymin", "xmax", "ymax"))
    corners = np.array([left - 1, top - 1, right, bottom])
    if not np.isfinite(corners).all():
        raise ValueError(f"a box from {left}, {top} to {right}, {bottom}")
    difficult = entry.findtext("difficult", "0").strip().lower() not in ("", "0", "false", "no")
    return _Object(_text(entry, "name"), corners, difficult)


def _text(entry: ET.Element, path: str) -> str:
    text = (entry.findtext(path) or "").strip()
    if not text:
        raise ValueError(f"<{entry.tag}> has no {path}")
    return text
