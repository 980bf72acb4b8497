"""Settings for data without a recipe, from the number and the size of its images."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from dsnet.data.transforms.augment import Augment
from dsnet.errors import DsnetError
from dsnet.models import create_model
from dsnet.models.convert import ConvertedNetwork
from dsnet.recipes.small import GPU
from dsnet.training.config import DataConfig, OptimConfig, RunConfig, SchemeConfig, TrainConfig

__all__ = ["fine_tuning_recipe", "recipe_for"]

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


# Fine-tuning of pretrained networks (docs/pretrained.md).
FINE_TUNING_RATE = 0.1 / 256  # learning rate per image of a batch, for the mean of the networks' losses
FINE_TUNING_CLIP = 2.0  # without it, training with kept statistics diverges at this rate
FINE_TUNED_IMAGES = {"cuda": 350_000, "cpu": 14_000}  # seen in a run
FINE_TUNING_EPOCHS = {"cuda": (10, 60), "cpu": (3, 30)}
FINE_TUNING_SIDE = {"cuda": 224, "cpu": 128}  # largest side of the images by default


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


def fine_tuning_recipe(
    data: DataConfig,
    *,
    images: int,
    classes: int,
    side: int,
    device: str,
    model: str,
    weights: str | None,
    by_order: bool = False,
) -> TrainConfig:
    """Return settings to fine-tune a pretrained network as a supernet.

    The largest route learns from labels and teaches the others (``id``): it is close to its accuracy from the
    start, so that its output is a better target than labels for the smaller routes. It starts from a
    classifier that is fitted to the pretrained features, and normalises by the pretrained statistics: those
    of batches, of few classes, would change the features.

    Args:
        data: The data.
        images: Number of training images.
        classes: Number of classes.
        side: Shorter side of the images in pixels.
        device: ``cuda`` or ``cpu``, which gets smaller images, fewer networks in a step and fewer epochs.
        model: ``timm:NAME``, or the name of a registered network.
        weights: File of the weights, or ``timm`` to download them; None for random ones.
        by_order: Take the tensors of the file by order instead of by name.
    """
    kind = "cuda" if device == "cuda" else "cpu"
    network = create_model(model, device="meta", num_classes=classes)
    if not isinstance(network, ConvertedNetwork):
        raise DsnetError(
            f"{model} is not a network to convert: --model takes timm:NAME or a network that "
            f"register_network registers; to train {model} on other data, give a recipe of it"
        )
    spec = network.input_spec
    size = data.size
    if size is None:
        largest = min(spec.image_size, FINE_TUNING_SIDE[kind])
        size = spec.image_size if spec.fixed else _within(side // spec.stride * spec.stride, (64, largest))
    hold_out = 0.2 if images < FEW * classes else 0.1
    trained = round(images * (1 - hold_out))
    batch = _power_of_two(
        min(_within(trained // 16, (16, 256 if kind == "cuda" else 32)), max(1, images // 2))
    )
    epochs = _within(round(FINE_TUNED_IMAGES[kind] / max(1, trained)), FINE_TUNING_EPOCHS[kind])
    run = replace(GPU, graphs=True) if kind == "cuda" else RunConfig(channels_last=True)
    return TrainConfig(
        model=model,
        options={"image_size": size},
        weights=weights,
        weights_by_order=by_order,
        fit_classifier=weights is not None,
        data=replace(data, size=size, hold_out=hold_out),
        augment=Augment(crop=(0.35, 1.0), flip=True),
        scheme=SchemeConfig(
            name="id", random=2 if kind == "cuda" else 0, smoothing=0.1, keep_statistics=weights is not None
        ),
        optim=OptimConfig(
            lr=FINE_TUNING_RATE * batch,
            weight_decay=1e-4,
            epochs=epochs,
            clip=FINE_TUNING_CLIP,
            warmup=max(1, epochs // 20),
            batch=batch,
        ),
        run=replace(run, validate_every=max(1, epochs // 20)),
    )


def _within(value: int, limits: tuple[int, int]) -> int:
    return min(max(value, limits[0]), limits[1])


def _power_of_two(limit: int) -> int:
    """Return the largest power of two up to a limit."""
    return 1 << (limit.bit_length() - 1)
