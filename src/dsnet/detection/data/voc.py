"""Folders in the layout of Pascal VOC: what is in every image, read before anything is trained.

    ROOT/JPEGImages/NAME.jpg    ROOT/Annotations/NAME.xml    ROOT/ImageSets/Main/SPLIT.txt

What is wrong with a file is told with its name. An image that cannot be used is left out and counted; a class
that nobody knows stops.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsnet.core.files import open_regular
from dsnet.data.decode import DecodeError, open_header
from dsnet.detection.eval.metrics import Truth
from dsnet.errors import DsnetError, printable, shorten

__all__ = ["VOC_CLASSES", "Annotated", "DetectionSet", "Problem", "read_voc", "shown_size", "wrong_size"]

VOC_CLASSES = (
    "aeroplane",
    "bicycle",
    "bird",
    "boat",
    "bottle",
    "bus",
    "car",
    "cat",
    "chair",
    "cow",
    "diningtable",
    "dog",
    "horse",
    "motorbike",
    "person",
    "pottedplant",
    "sheep",
    "sofa",
    "train",
    "tvmonitor",
)
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


class Problem(NamedTuple):
    """Something that is wrong with a file, and what became of it."""

    file: Path
    what: str


class Annotated(NamedTuple):
    """An image and what is in it, in pixels."""

    image: Path
    width: int
    height: int
    truth: Truth


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DetectionSet:
    """Images with their boxes."""

    classes: tuple[str, ...]
    items: tuple[Annotated, ...]
    problems: tuple[Problem, ...] = field(default=())
    listed: int = 0  # images that were asked for, with those that cannot be used

    def __str__(self) -> str:
        counts = Counter(int(number) for item in self.items for number in item.truth.classes)
        boxes = ", ".join(f"{counts[number]} {name}" for number, name in enumerate(self.classes))
        text = f"{len(self.items)} images with {sum(counts.values())} boxes: {boxes}"
        if not self.problems:
            return text
        shown = "\n".join(f"  {problem.file}: {problem.what}" for problem in self.problems[:5])
        more = len(self.problems) - 5
        return f"{text}\n{len(self.problems)} problems:\n{shown}" + (
            f"\n  and {more} more" if more > 0 else ""
        )


def read_voc(
    root: Path | str, split: str | None = None, *, classes: Sequence[str] | None = None
) -> DetectionSet:
    """Reads a folder; without ``split`` all annotations, without ``classes`` those that are there, sorted."""
    root = Path(root)
    where = root if split is None else f"{root}, {split}"
    problems: list[Problem] = []
    names = _names(root, split, problems)
    read = [found for name in names if (found := _read(root, name, problems)) is not None]
    if not read:
        first = f"; {problems[0].file}: {problems[0].what}" if problems else ""
        raise DsnetError(f"no image of {where} can be used{first}")
    there = sorted({label for file in read for label in file.labels})
    if not there:
        raise DsnetError(f"no image of {where} has a box")
    known = tuple(there if classes is None else classes)
    if len(set(known)) != len(known):
        raise DsnetError(f"class names must differ: {printable(', '.join(known), 1000)}")
    for file in read:
        for label in file.labels:
            if label not in known:
                raise DsnetError(
                    f"{file.path}: class {shorten(label)} is not in the list: "
                    f"{printable(', '.join(known), 1000)}"
                )
    numbers = {name: number for number, name in enumerate(known)}
    items = tuple(
        Annotated(
            file.image,
            file.width,
            file.height,
            Truth(
                file.boxes,
                np.array([numbers[label] for label in file.labels], dtype=np.int64),
                file.difficult,
            ),
        )
        for file in read
    )
    return DetectionSet(classes=known, items=items, problems=tuple(problems), listed=len(names))


def _names(root: Path, split: str | None, problems: list[Problem]) -> list[str]:
    folder = root / "Annotations"
    if not folder.is_dir():
        raise DsnetError(
            f"{root} is no folder in VOC's layout: it needs Annotations/*.xml, JPEGImages and, for a split, "
            "ImageSets/Main/SPLIT.txt"
        )
    if split is None:
        return sorted(path.stem for path in folder.glob("*.xml"))
    listed = root / "ImageSets" / "Main" / f"{split}.txt"
    if not listed.is_file():
        there = sorted(path.stem for path in listed.parent.glob("*.txt"))
        raise DsnetError(
            f"{root} has no split {shorten(split)}; possible: {printable(', '.join(there), 500) or 'none'}"
        )
    try:
        text = listed.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DsnetError(f"{listed} is no text: {error}") from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # Lists of single classes have a number behind every name; a name may have spaces, too.
    names = [line if (folder / f"{line}.xml").is_file() else line.split()[0] for line in lines]
    problems += [
        Problem(listed, f"names {name} {count} times; it counts once")
        for name, count in Counter(names).items()
        if count > 1
    ]
    return list(dict.fromkeys(names))


class _File(NamedTuple):
    path: Path
    image: Path
    width: int
    height: int
    boxes: NDArray[np.float64]
    labels: list[str]
    difficult: NDArray[np.bool_]


def _read(root: Path, name: str, problems: list[Problem]) -> _File | None:
    path = root / "Annotations" / f"{name}.xml"
    try:
        with open_regular(path) as file:
            tree = ET.parse(file).getroot()
        width, height = (int(float(_text(tree, f"size/{side}"))) for side in ("width", "height"))
        found = [_object(entry) for entry in tree.iter("object")]
    except (OSError, ET.ParseError, ValueError, LookupError, OverflowError) as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        problems.append(Problem(path, f"{why}; the image is left out"))
        return None
    suffixes = (*SUFFIXES, *map(str.upper, SUFFIXES))
    image = next((p for s in suffixes if (p := root / "JPEGImages" / f"{name}{s}").is_file()), None)
    if image is None or width < 1 or height < 1:
        what = "has no image in JPEGImages" if image is None else f"says that the image is {width} × {height}"
        problems.append(Problem(path, f"{what}; it is left out"))
        return None
    if (wrong := wrong_size(shown_size(image), width, height)) is not None:  # its boxes mean nothing then
        problems.append(Problem(image, f"{wrong}; the image is left out"))
        return None
    boxes, labels, difficult = [], [], []
    for label, corners, hard in found:
        kept = np.clip(corners, 0, [width, height, width, height])
        if (kept[2:] <= kept[:2]).any():
            problems.append(Problem(path, f"a box of {label} has no area in the image; the box is left out"))
            continue
        if np.abs(kept - corners).max() > 1:  # one pixel is a matter of counting from 0 or from 1
            problems.append(Problem(path, f"a box of {label} lies partly outside the image; it is cut"))
        boxes.append(kept)
        labels.append(label)
        difficult.append(hard)
    if not boxes:
        problems.append(Problem(path, "has no box; the image is kept"))
    found_boxes = np.array(boxes, dtype=np.float64).reshape(-1, 4)
    return _File(path, image, width, height, found_boxes, labels, np.array(difficult, dtype=bool))


def shown_size(image: Path) -> tuple[int, int] | None:
    """Width and height as an image is shown, by its header; none: it cannot be read."""
    try:
        with open_header(str(image)) as opened:
            turned = opened.getexif().get(0x0112, 1) in (5, 6, 7, 8)  # the tag of orientation: on its side
            width, height = opened.size
    except DecodeError:
        return None
    return (height, width) if turned else (width, height)


def wrong_size(shown: tuple[int, int] | None, width: int, height: int) -> str | None:
    """What is wrong where an image has another size than its boxes say."""
    if shown is None or shown == (width, height):
        return None
    if shown == (height, width):
        return (
            f"it is shown turned (EXIF), as {height} × {width} pixels, and its boxes are for "
            f"{width} × {height}: turn the file itself or take the tag off"
        )
    return f"it has {shown[0]} × {shown[1]} pixels, not {width} × {height} as its boxes say"


def _object(entry: ET.Element) -> tuple[str, NDArray[np.float64], bool]:
    left, top, right, bottom = (float(_text(entry, f"bndbox/{n}")) for n in ("xmin", "ymin", "xmax", "ymax"))
    corners = np.array([left - 1, top - 1, right, bottom])
    if not np.isfinite(corners).all():
        raise ValueError(f"a box from {left}, {top} to {right}, {bottom}")
    hard = entry.findtext("difficult", "0").strip().lower() not in ("", "0", "false", "no")
    return _text(entry, "name"), corners, hard


def _text(entry: ET.Element, path: str) -> str:
    text = (entry.findtext(path) or "").strip()
    if not text:
        raise ValueError(f"<{entry.tag}> has no {path}")
    return text
