"""Settings for data without a recipe, from the number and the size of its images."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from dsnet.data.transforms.augment import Augment
from dsnet.recipes.small import GPU
from dsnet.training.config import DataConfig, OptimConfig, RunConfig, SchemeConfig, TrainConfig

__all__ = ["recipe_for"]

SMALL = 48  # pixels up to which images are small
FEW = 50  # images of a class below which more are held out
MANY = 20_000  # images from which on weights decay as on CIFAR-10, else as on Imagenette


class _Network(NamedTuple):
    """A network, its image sizes and the length of its training."""

    model: str
    unit: int  # sizes are multiples of this
    sizes: tuple[int, int]
    steps: int  # aimed at
    epochs: tuple[int, int]  # smallest and largest number
    batch: int  # largest
    random: int = 2  # networks in a step besides the largest and the smallest
    rate: float = 0.2 / 256  # learning rate per image of a batch, for the sum of the networks' losses


NETWORKS = {
    ("cuda", "small"): _Network("ds_mbnet_cifar", 8, (16, 48), 2000, (30, 200), 256),
    ("cuda", "large"): _Network("ds_mbnet", 32, (96, 224), 2000, (30, 200), 256),
    ("cpu", "small"): _Network("ds_mbnet_tiny", 8, (16, 48), 2000, (10, 200), 64),
    # Half the networks in a step allow twice the epochs, which matter more for few images.
    ("cpu", "large"): _Network("ds_mbnet_small", 16, (64, 96), 900, (10, 200), 32, random=0, rate=0.2 / 64),
}


def recipe_for(data: DataConfig, *, images: int, classes: int, side: int, device: str) -> TrainConfig:
    """Return settings for data.

    Args:
        data: The data.
        images: Number of training images.
        classes: Number of classes.
        side: Shorter side of the images in pixels.
        device: ``cuda`` or ``cpu``, which gets a smaller network, smaller images and fewer steps.
    """
    kind = "cuda" if device == "cuda" else "cpu"
    small = side <= SMALL
    network = NETWORKS[kind, "small" if small else "large"]
    size = _within((side + network.unit // 2) // network.unit * network.unit, network.sizes)
    hold_out = 0.2 if images < FEW * classes else 0.1
    trained = round(images * (1 - hold_out))
    batch = _power_of_two(min(_within(trained // 8, (16, network.batch)), max(1, images // 2)))
    epochs = _within(round(network.steps / max(1, trained // batch)), network.epochs)
    optim = OptimConfig(
        lr=network.rate * batch,
        weight_decay=1.25e-3 if images >= MANY else 2.5e-3,
        epochs=epochs,
        warmup=max(1, epochs // 10),
        batch=batch,
    )
    scheme = SchemeConfig(name="h-ib+mvco" if kind == "cuda" else "ib", alpha=0.99, start=0.3, add=True)
    run = GPU if kind == "cuda" else RunConfig()
    if kind == "cpu" and not small:  # soft targets come too late in a run this short
        scheme = SchemeConfig(name="label", random=network.random, add=True)
        run = RunConfig(channels_last=True)  # a quarter faster on CPUs at this size
    return TrainConfig(
        model=network.model,
        data=replace(data, size=size, hold_out=hold_out),
        augment=Augment(padding=size // 8, flip=True) if small else Augment(crop=(0.25, 1.0), flip=True),
        scheme=scheme,
        optim=optim,
        run=replace(run, validate_every=max(1, epochs // 20)),
    )


def _within(value: int, limits: tuple[int, int]) -> int:
    return min(max(value, limits[0]), limits[1])


def _power_of_two(limit: int) -> int:
    """Return the largest power of two up to a limit."""
    return 1 << (limit.bit_length() - 1)
