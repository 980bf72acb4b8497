"""Boxes that are drawn into images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from dsnet.detection.eval.metrics import Detections
from dsnet.detection.visualize import class_colour, draw_detections

SIDE = 64


def drawn(folder: Path, box: tuple[float, ...]) -> NDArray[np.uint8]:
    """The pixels [64, 64, 3] of a black image with one box, given in pixels."""
    path = folder / "black.png"
    Image.new("RGB", (SIDE, SIDE)).save(path)
    found = Detections(np.array([box]) / SIDE, np.array([0.5]), np.array([1]))
    return np.asarray(draw_detections(path, found, ["cat", "dog"]))


def test_the_outline_has_the_colour_of_its_class(tmp_path: Path) -> None:
    pixels = drawn(tmp_path, (8, 24, 56, 60))
    sides = pixels[24:61, 8], pixels[24:61, 56], pixels[60, 8:57]
    assert all(bool((side == class_colour(1)).all()) for side in sides)
    assert not pixels[30:50, 15:50].any()


@pytest.mark.parametrize(
    "box",
    [(30, 24, 30.9, 60), (8, 40, 56, 40.9), (30, 40, 30.9, 40.9), (56, 24, 8, 60), (8, 60, 56, 24)],
    ids=["narrow", "low", "small", "swapped sides", "upside down"],
)
def test_boxes_below_a_pixel_are_not_drawn(tmp_path: Path, box: tuple[float, ...]) -> None:
    assert not drawn(tmp_path, box).any()
