"""Recipes in which routes differ in the size of their images too."""

from __future__ import annotations

from dataclasses import replace

from dsnet.data.transforms.augment import Augment
from dsnet.recipes.registry import register_recipe
from dsnet.recipes.small import CIFAR, DIGITS, imagenette_mbnet
from dsnet.training.config import DataConfig, OptimConfig, RunConfig, SchemeConfig, TrainConfig

SIZES = (64, 96, 128)
LITE0 = TrainConfig(
    model="timm:tf_efficientnet_lite0",
    options={"image_sizes": SIZES},
    weights="timm",
    fit_classifier=True,
    data=DataConfig(name="imagenette", size=SIZES[-1]),
    augment=Augment(crop=(0.35, 1.0), flip=True),
    scheme=SchemeConfig(name="id", random=2, smoothing=0.1, keep_statistics=True),
    optim=OptimConfig(lr=0.1, weight_decay=1e-4, clip=2.0, epochs=60, warmup=1, batch=256),
    run=RunConfig(precision="bfloat16", channels_last=True, graphs=True),
)


@register_recipe
def digits_mbnet_sizes() -> TrainConfig:
    """DS-MBNet on digits at 8 and 16 pixels: E-IB, 20 epochs.

    Duration: 1 minute on one CPU core
    Expect: 96.4 / 98.8 % at the smallest / largest route; a cascade has 98.4 % at 20 % of the largest's
        multiply-adds (3 seeds, 359 test images)
    """
    return replace(DIGITS, options={"image_sizes": (8, 16)})


@register_recipe
def fashion_mnist_resnet() -> TrainConfig:
    """DS-ResNet++ at 16 and 32 pixels on Fashion-MNIST: ID, 4 epochs. The weights of `dsnet demo`.

    Duration: 22 minutes on one thread of a CPU that did other work as well
    Expect: 85.7 / 90.1 % at the smallest / largest route (one seed, 10,000 test images)
    """
    return TrainConfig(
        model="ds_resnet_plus_tiny",
        options={"image_sizes": (16, 32)},
        data=DataConfig(name="fashion_mnist", hold_out=0.02, calibration=3000),
        augment=Augment(padding=2, flip=True),
        scheme=SchemeConfig(name="id", random=1),
        optim=OptimConfig(lr=0.3, weight_decay=2e-4, epochs=4, warmup=0.25, batch=64),
        run=RunConfig(device="cpu", precision="bfloat16", channels_last=True, validate_every=4, log_every=50),
    )


@register_recipe
def cifar10_mbnet_sizes() -> TrainConfig:
    """DS-MBNet on CIFAR-10 at 16, 24 and 32 pixels.

    Duration: not measured yet
    Expect: not measured yet
    """
    return replace(CIFAR, options={"image_sizes": (16, 24, 32)})


@register_recipe
def imagenette_mbnet_sizes() -> TrainConfig:
    """DS-MBNet on Imagenette at 64, 96 and 128 pixels, from scratch.

    Duration: not measured yet
    Expect: not measured yet
    """
    return replace(imagenette_mbnet(), options={"image_sizes": SIZES})


@register_recipe
def imagenette_lite0() -> TrainConfig:
    """EfficientNet-Lite0 with ImageNet weights on Imagenette, four widths at 64, 96 and 128 pixels.

    Most of Imagenette's test images are in ImageNet's training set: accuracies compare routes only.

    Duration: not measured yet
    Expect: not measured yet
    """
    return LITE0


@register_recipe
def voc_crops_lite0() -> TrainConfig:
    """EfficientNet-Lite0 with ImageNet weights on objects cut from VOC 2012, four widths at three sizes.

    Duration: not measured yet
    Expect: not measured yet
    """
    return replace(LITE0, data=replace(LITE0.data, name="voc_crops"))
