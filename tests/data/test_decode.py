"""Decoding single files."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from dsnet.data.decode import decode


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_upright(orientation: int) -> None:
    """Against Pillow's own way of turning them."""
    pixels = np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(file.getvalue())))
    plain = io.BytesIO()
    upright.save(plain, "PNG", exif=b"")
    turned = decode(file.getvalue(), 8)
    assert torch.equal(turned, decode(plain.getvalue(), 8))
    if orientation != 1:
        original = io.BytesIO()
        Image.fromarray(pixels).save(original, "PNG")
        assert not torch.equal(turned, decode(original.getvalue(), 8))
