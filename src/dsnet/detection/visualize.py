"""Draw detections into images."""

from __future__ import annotations

import colorsys
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsnet.data.decode import open_image, pillow
from dsnet.data.find_images import find_images
from dsnet.detection.eval.metrics import Detections
from dsnet.errors import printable

__all__ = ["class_colour", "draw_detections", "drawing_paths"]


def class_colour(label: int) -> tuple[int, int, int]:
    """Return the colour of a class: neighbours differ, all are dark enough for white text."""
    red, green, blue = colorsys.hls_to_rgb((0.61 * label + 0.02) % 1, 0.38, 0.8)
    return round(255 * red), round(255 * green), round(255 * blue)


def draw_detections(source: str | Path, detections: Detections, classes: Sequence[str]) -> Any:  # noqa: ANN401
    """Draw detections, whose boxes are shares of the image, into a Pillow image; the best one is on top."""
    pillow()
    from PIL import ImageDraw, ImageFont

    image = open_image(str(source))
    pen = ImageDraw.Draw(image)
    line = max(2, round(min(image.size) / 250))
    font = ImageFont.load_default(size=max(11, round(min(image.size) / 36)))
    rows = zip(
        detections.boxes.tolist(), detections.scores.tolist(), detections.classes.tolist(), strict=True
    )
    for box, score, label in reversed(list(rows)):
        left, top, right, bottom = (
            share * side for share, side in zip(box, (*image.size, *image.size), strict=True)
        )
        if right - left < 1 or bottom - top < 1:
            continue
        colour, text = class_colour(label), f"{printable(classes[label])} {score:.0%}"
        pen.rectangle((left, top, right, bottom), outline=colour, width=line)
        _, _, width, height = pen.textbbox((0, 0), text, font=font)
        x = min(left, max(0, image.width - width - 4))
        y = top - height - 4 if top >= height + 4 else top
        pen.rectangle((x, y, x + width + 4, y + height + 4), fill=colour)
        pen.text((x + 2, y + 1), text, fill="white", font=font)
    return image


def drawing_paths(sources: Sequence[str], folder: Path) -> dict[str, Path]:
    """Choose where the drawing of each image goes, by the image's path.

    Drawings keep the layout of the folders that their images come from. Each of several source folders gets a
    folder of its own. Names that would clash get a number.
    """
    drawings: dict[str, Path] = {}
    seen: set[str] = set()
    used: set[Path] = set()
    folders = [source for source in sources if os.path.isdir(source)]
    for source in sources:
        inside = Path(os.path.abspath(source)).name if len(folders) > 1 and source in folders else ""
        paths = find_images([source])
        if source in folders:
            base = source
        else:  # a file, or the matches of a pattern
            base = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
        for path in paths:
            if os.path.abspath(path) in seen:
                continue
            seen.add(os.path.abspath(path))
            wanted = folder / inside / os.path.relpath(path, base)
            target, number = wanted.with_suffix(".png"), 1
            while target in used:
                number += 1
                target = wanted.with_name(f"{wanted.stem}-{number}.png")
            used.add(target)
            drawings[path] = target
    return drawings
