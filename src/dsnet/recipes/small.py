"""Recipes that run in seconds to minutes: digits on a laptop, CIFAR and Imagenette on one GPU."""

from __future__ import annotations

from dataclasses import replace

from dsnet.data.transforms.augment import Augment
from dsnet.recipes.registry import register_recipe
from dsnet.training.config import DataConfig, OptimConfig, RunConfig, SchemeConfig, TrainConfig

DIGITS = TrainConfig(
    data=DataConfig(name="digits"),
    scheme=SchemeConfig(name="e-ib", alpha=0.97),
    optim=OptimConfig(lr=0.2, epochs=20, warmup=1, batch=64),
)


@register_recipe
def digits_mbnet() -> TrainConfig:
    """DS-MBNet on digits (in scikit-learn): E-IB, 20 epochs. The one to try first.

    Duration: 21 s on two CPU cores
    Expect: 96.9 / 98.6 % at the smallest / largest route (one seed, 359 test images)
    """
    return DIGITS


@register_recipe
def digits_resnet() -> TrainConfig:
    """DS-ResNet with two gates on digits: IB, 20 epochs.

    Duration: 1 min 40 s on two CPU cores
    Expect: 96.1 / 98.9 % at the smallest / largest route (one seed, 359 test images)
    """
    return replace(
        DIGITS,
        model="ds_resnet_tiny",
        scheme=SchemeConfig(name="ib", alpha=0.97),
        optim=replace(DIGITS.optim, lr=0.5),
    )


@register_recipe
def digits_vit() -> TrainConfig:
    """DS-ViT++ on digits: labels, AdamW, 30 epochs.

    Duration: 36 s on two CPU cores
    Expect: 95.8 / 96.4 % at the smallest / largest route (one seed, 359 test images)
    """
    return replace(
        DIGITS,
        model="ds_vit_plus_tiny",
        scheme=SchemeConfig(name="label", random=1),
        optim=OptimConfig(kind="adamw", lr=2e-3, weight_decay=0.05, epochs=30, warmup=2, batch=64),
    )


GPU = RunConfig(precision="bfloat16", channels_last=True)
CIFAR = TrainConfig(
    model="ds_mbnet_cifar",
    data=DataConfig(name="cifar10"),
    augment=Augment(padding=4, flip=True),
    scheme=SchemeConfig(name="h-ib+mvco", alpha=0.99, start=0.3, add=True),
    optim=OptimConfig(lr=0.2, weight_decay=1.25e-3, epochs=30, warmup=3, batch=512),
    run=GPU,
)


@register_recipe
def cifar10_mbnet() -> TrainConfig:
    """DS-MBNet on CIFAR-10.

    Duration: 6 minutes on an H200 that trains another at the same time
    Expect: 92.1 / 92.7 / 92.7 % at routes 0 / 7 / 13 (3 seeds; stand-alone 91.6 / 92.1 / 92.7 %)
    """
    return CIFAR


@register_recipe
def cifar100_mbnet() -> TrainConfig:
    """DS-MBNet on CIFAR-100, as on CIFAR-10.

    Duration: as cifar10_mbnet
    Expect: not measured yet
    """
    return replace(CIFAR, data=DataConfig(name="cifar100"))


@register_recipe
def cifar10_guideline1() -> TrainConfig:
    """Guideline I on CIFAR-10: MobileNetV1's third stage as 1 or 6 layers that add to each other.

    ``options.join=naive`` shares weights without adding; ``scheme.route=0`` and ``1`` stand alone.

    Duration: 5 minutes on an H200 that trains six more at the same time
    Expect: 91.5 / 92.8 % with 1 / 6 layers (2 seeds; naive 91.7 / 92.7 %, stand-alone 91.5 / 92.7 %)
    """
    return replace(CIFAR, model="mbnet_depth_cifar", scheme=SchemeConfig(name="label", random=0))


@register_recipe
def imagenette_mbnet() -> TrainConfig:
    """DS-MBNet on Imagenette at 128 pixels.

    Duration: 7 minutes on an H200 that trains four more at the same time
    Expect: 86.9 / 86.7 / 86.7 % at routes 0 / 7 / 13 (one seed; stand-alone 84.4 / 83.9 / 83.5 %)
    """
    return replace(
        CIFAR,
        model="ds_mbnet",
        data=DataConfig(name="imagenette", size=128),
        augment=Augment(crop=(0.25, 1.0), flip=True),
        optim=OptimConfig(lr=0.2, weight_decay=2.5e-3, epochs=40, warmup=3, batch=256),
    )
