"""Images with the boxes that were found in them."""

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

__all__ = ["colour_of", "draw_boxes", "drawn", "drawn_names"]


def colour_of(number: int) -> tuple[int, int, int]:
    """Of a class: neighbours differ, all are dark enough for white letters."""
    red, green, blue = colorsys.hls_to_rgb((0.61 * number + 0.02) % 1, 0.38, 0.8)
    return round(255 * red), round(255 * green), round(255 * blue)


def draw_boxes(source: str | Path, found: Detections, classes: Sequence[str], out: Path) -> None:
    """Writes the image with its boxes."""
    drawn(source, found, classes).save(out)


def drawn(source: str | Path, found: Detections, classes: Sequence[str]) -> Any:  # noqa: ANN401
    """An image of Pillow with its boxes, which are shares of it, the best on top."""
    pillow()
    from PIL import ImageDraw, ImageFont

    image = open_image(str(source))
    pen = ImageDraw.Draw(image)
    line = max(2, round(min(image.size) / 250))
    font = ImageFont.load_default(size=max(11, round(min(image.size) / 36)))
    every = list(zip(found.boxes.tolist(), found.scores.tolist(), found.classes.tolist(), strict=True))
    for box, score, kind in reversed(every):
        left, top, right, bottom = (
            share * side for share, side in zip(box, (*image.size, *image.size), strict=True)
        )
        if right - left < 1 or bottom - top < 1:
            continue
        colour, text = colour_of(kind), f"{printable(classes[kind])} {score:.0%}"
        pen.rectangle((left, top, right, bottom), outline=colour, width=line)
        _, _, width, height = pen.textbbox((0, 0), text, font=font)
        x = min(left, max(0, image.width - width - 4))
        y = top - height - 4 if top >= height + 4 else top
        pen.rectangle((x, y, x + width + 4, y + height + 4), fill=colour)
        pen.text((x + 2, y + 1), text, fill="white", font=font)
    return image


def drawn_names(given: Sequence[str], folder: Path) -> dict[str, Path]:
    """Where every image with its boxes goes, by its path: under a folder, as it lies in what was given.

    Of several folders each has one of its own. Names that would meet get a number.
    """
    drawn: dict[str, Path] = {}
    seen: set[str] = set()
    taken: set[Path] = set()
    folders = [name for name in given if os.path.isdir(name)]
    for name in given:
        inside = Path(os.path.abspath(name)).name if len(folders) > 1 and name in folders else ""
        found = find_images([name])
        if name in folders:
            base = name
        else:  # a file, or what a pattern found
            base = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in found])
        for path in found:
            if os.path.abspath(path) in seen:
                continue
            seen.add(os.path.abspath(path))
            place = folder / inside / os.path.relpath(path, base)
            target, number = place.with_suffix(".png"), 1
            while target in taken:
                number += 1
                target = place.with_name(f"{place.stem}-{number}.png")
            taken.add(target)
            drawn[path] = target
    return drawn
