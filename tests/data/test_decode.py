"""Decoding single files."""

from __future__ import annotations

import io
import os
import struct
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from dsnet.data.dataset import Crops
from dsnet.data.decode import DecodeError, DecodeErrors, decode, decode_all, open_header
from dsnet.data.readers.folder import ImagePaths
from dsnet.detection.data.dataset import open_square
from dsnet.detection.data.voc import displayed_size
from dsnet.errors import DsnetWarning
from tests.support import error_of
from tests.support.image_files import picture, resized_then_cropped


def encoded(width: int, height: int) -> bytes:
    pixels = np.random.default_rng(width).integers(60, 196, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()  # nothing so dark or bright that Pillow cuts off what the filter makes of it
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def damage_of(read: Callable[[], object]) -> str:
    """Why an image cannot be read."""
    with pytest.raises(DecodeError) as caught:
        read()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_upright(orientation: int, kind: str) -> None:
    """Against Pillow's own way of turning them."""
    pixels = np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(file.getvalue())))
    plain = io.BytesIO()
    upright.save(plain, "PNG", exif=b"")
    turned = decode(file.getvalue(), 8)
    assert torch.equal(turned, decode(plain.getvalue(), 8))
    if orientation != 1:
        original = io.BytesIO()
        Image.fromarray(pixels).save(original, "PNG")
        assert not torch.equal(turned, decode(original.getvalue(), 8))


@pytest.mark.parametrize("sides", [(40, 40), (40, 57), (300, 200), (31, 33), (160, 10), (7, 99), (224, 500)])
@pytest.mark.parametrize(("size", "shorter", "ratio"), [(224, 256, 0.875), (32, 32, 1.0)])
def test_ordinary_images_are_resized_whole_and_cropped(
    sides: tuple[int, int], size: int, shorter: int, ratio: float
) -> None:
    data = encoded(*sides)
    decoded = decode(data, size, ratio=ratio)[0].numpy()
    assert np.array_equal(decoded, resized_then_cropped(data, size, shorter))


@pytest.mark.parametrize("sides", [(3, 60), (5, 97), (400, 20), (1, 40), (700, 33)])
def test_elongated_images_come_out_the_same_but_for_rounding(sides: tuple[int, int]) -> None:
    data = encoded(*sides)
    decoded = decode(data, 24, ratio=0.875)[0].numpy().astype(int)
    assert abs(decoded - resized_then_cropped(data, 24, round(24 / 0.875))).max() <= 2


@pytest.mark.parametrize(
    ("sides", "ratio", "crops"),
    [
        ((1, 65_500), 1.0, None),
        ((65_500, 1), 1.0, None),
        ((1, 65_500), 1.0, Crops(views=2)),
        ((65_500, 1), 1.0, Crops(views=2)),
        ((64, 48), 0.001, None),  # a ratio that a checkpoint may have
    ],
)
def test_only_the_crop_of_an_elongated_image_is_resized(
    sides: tuple[int, int], ratio: float, crops: Crops | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    resize = Image.Image.resize

    def small(image: Image.Image, size: tuple[int, int], *args: object, **options: object) -> Image.Image:
        assert size[0] * size[1] <= 10**6
        return resize(image, size, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Image.Image, "resize", small)
    assert decode(encoded(*sides), 224, ratio=ratio, crops=crops).shape == (2 if crops else 1, 3, 224, 224)


def test_too_many_pixels_are_refused_by_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(40, 30)
    monkeypatch.setenv("DSNET_MAX_PIXELS", "1200")
    assert decode(data, 8).shape == (1, 3, 8, 8)
    monkeypatch.setenv("DSNET_MAX_PIXELS", "1199")
    monkeypatch.setattr(Image.Image, "load", lambda image: pytest.fail("decoded"))
    message = damage_of(lambda: decode(data, 8))
    assert "40 × 30 pixels" in message
    assert "DSNET_MAX_PIXELS" in message
    assert shown_size_of(data) == "40 × 30 pixels"
    for wrong in ("0", "many", "-1", "1e6", "9" * 4000):
        monkeypatch.setenv("DSNET_MAX_PIXELS", wrong)
        message = error_of(lambda: decode(data, 8))
        assert "whole number" in message
        assert len(message) < 250


def shown_size_of(data: bytes) -> str:
    return damage_of(lambda: open_header(data).__enter__()).removeprefix("it has ").partition(",")[0]


def test_the_pixel_limit_of_pillow_is_raised_to_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert decode(encoded(40, 30), 8).shape == (1, 3, 8, 8)


def test_the_error_of_pillow_about_pixels_names_our_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)  # Pillow refuses twice as many before we are asked
    monkeypatch.setenv("DSNET_MAX_PIXELS", "500")
    message = damage_of(lambda: decode(encoded(40, 30), 8))
    assert message.startswith("it has more than 500 pixels")
    assert "DSNET_MAX_PIXELS" in message


def test_too_many_pixels_are_an_error_without_a_warning_of_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    monkeypatch.setenv("DSNET_MAX_PIXELS", "1000")  # Pillow would warn of 1,001 to 2,000 pixels
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        assert "40 × 30 pixels" in damage_of(lambda: decode(encoded(40, 30), 8))
    assert not shown


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        SyntaxError("broken PNG file"),
        ValueError("bad value"),
        struct.error("unpack requires a buffer of 4 bytes"),
        EOFError("no more frames"),
        RuntimeError("Failed to decode image"),
        KeyError(3),
        RecursionError(),
        OSError("x" * 10**6 + "\x1b[2J"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("stage", ["open", "load"])
def test_any_exception_of_a_decoder_is_a_decode_error(
    error: Exception, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every reader of files; a good image beside the damaged one stays."""

    def fail(*_: object, **__: object) -> None:
        raise error

    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(picture(1))
    path = str(tmp_path / "a.png")
    with monkeypatch.context() as patch:
        patch.setattr(*(Image, "open") if stage == "open" else (Image.Image, "convert"), fail)
        reason = damage_of(lambda: decode(path, 8))
        assert damage_of(lambda: open_square(path, 8)) == reason
        assert displayed_size(tmp_path / "a.png") == (None if stage == "open" else (40, 43))
    assert reason
    assert len(reason) < 250
    assert reason.isprintable()
    plain, damage = Image.open, DecodeErrors()
    monkeypatch.setattr(Image, "open", lambda file: fail() if file.name == path else plain(file))
    with pytest.warns(DsnetWarning, match=r"a\.png"):
        images, kept = decode_all(ImagePaths(tmp_path, ["a.png", "b.png"]), 8, decode_errors=damage)
    assert (len(images), kept.tolist(), list(damage.reasons)) == (1, [1], [path])


def test_an_interrupt_is_no_decode_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Image, "open", stop)
    with pytest.raises(KeyboardInterrupt):
        decode(picture(0), 8)


def test_pipes_devices_and_folders_are_decode_errors(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.png"
    os.mkfifo(fifo)
    writer = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)  # a reader that opens it gets its end in a while
    timer = threading.Timer(2, os.close, [writer])
    timer.start()
    assert "named pipe" in damage_of(lambda: decode(str(fifo), 8))
    assert displayed_size(fifo) is None
    timer.cancel()
    os.close(writer)
    assert "device" in damage_of(lambda: decode("/dev/zero", 8))
    assert "folder" in damage_of(lambda: decode(str(tmp_path), 8))
    assert damage_of(lambda: decode(str(tmp_path / "none.png"), 8)) == "No such file or directory"
