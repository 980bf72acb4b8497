"""A folder in VOC's layout, made up: red and blue boxes on noise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from dsnet.detection.boxes import encode, match
from dsnet.detection.model.fssd import FssdTable
from dsnet.detection.train._loss import PriorTargets

SIDE = 64


def write_voc(root: Path, count: int, seed: int = 0) -> Path:
    """Writes ``count`` images, three of four for training."""
    for part in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (root / part).mkdir(parents=True)
    images, boxes, classes = made_up(count, seed)
    names = [f"image{number}" for number in range(count)]
    for name, image, own, kinds in zip(names, images, boxes, classes, strict=True):
        pixels = (image * 60 + 100).clamp(0, 255).byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).resize((SIDE, SIDE)).save(root / "JPEGImages" / f"{name}.png")
        objects = ""
        for (left, top, right, bottom), kind in zip((own * SIDE).tolist(), kinds.tolist(), strict=True):
            box = f"<xmin>{left + 1}</xmin><ymin>{top + 1}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax>"
            objects += f"<object><name>{('red', 'blue')[kind]}</name><bndbox>{box}</bndbox></object>"
        size = f"<size><width>{SIDE}</width><height>{SIDE}</height></size>"
        (root / "Annotations" / f"{name}.xml").write_text(f"<annotation>{size}{objects}</annotation>")
    for split, own_names in (("trainval", names[: count * 3 // 4]), ("test", names[count * 3 // 4 :])):
        (root / "ImageSets" / "Main" / f"{split}.txt").write_text("\n".join(own_names))
    return root


@pytest.fixture(scope="session")
def voc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_voc(tmp_path_factory.mktemp("voc") / "boxes", 24)


SIZE = 32


TABLE = FssdTable(strides=(4, 8), project=16, pyramid=(24, 24, 24), ratios=((2.0,), (2.0,), (2.0,)))


def made_up(count: int, seed: int = 0) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Images of noise, each with one or two boxes: red (class 0) or blue (class 1)."""
    draw = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, SIZE, SIZE, generator=draw) * 0.1
    boxes, classes = [], []
    for image in images:
        own, kinds = [], []
        for half in range(1 + int(torch.randint(0, 2, (1,), generator=draw))):
            size = torch.randint(8, 15, (2,), generator=draw)
            left, top = (int(torch.randint(0, 16 - int(s) + 1, (1,), generator=draw)) for s in size)
            left += 16 * half
            kind = int(torch.randint(0, 2, (1,), generator=draw))
            image[2 * kind, top : top + int(size[1]), left : left + int(size[0])] += 2.0
            own.append([left, top, left + int(size[0]), top + int(size[1])])
            kinds.append(kind)
        boxes.append(torch.tensor(own) / SIZE)
        classes.append(torch.tensor(kinds))
    return images, boxes, classes


def reference_targets(priors: Tensor, boxes: list[Tensor], classes: list[Tensor]) -> PriorTargets:
    """Match and encode image by image, as a reference for `prior_targets`."""
    offsets = torch.zeros(len(boxes), *priors.shape, dtype=priors.dtype)
    labels = torch.zeros(len(boxes), len(priors), dtype=torch.long)
    for row, (corners, own) in enumerate(zip(boxes, classes, strict=True)):
        matched = match(priors, corners)
        for prior, box in enumerate(matched.tolist()):
            if box >= 0:
                offsets[row, prior] = encode(corners[box : box + 1], priors[prior : prior + 1])[0]
                labels[row, prior] = own[box] + 1
    return PriorTargets(offsets, labels)
