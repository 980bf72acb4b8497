"""Recipes that begin with another run: ``start`` is its folder, and the recipe of that name trains it.

They do what ``dsnet transfer`` does up to the gate; ``dsnet gate NEW --set start=OLD`` transfers that too.
"""

from __future__ import annotations

from dataclasses import replace

from dsnet.data.transforms.augment import Augment
from dsnet.recipes import imagenet, small
from dsnet.recipes.registry import Recipe, register_recipe
from dsnet.training.config import DataConfig, OptimConfig, TrainConfig

PAPER = replace(
    imagenet.CNN,
    model="ds_mbnet",
    start="runs/imagenet_ds_mbnet",
    data=DataConfig(name="cifar10", size=224),
    optim=replace(imagenet.CNN.optim, lr=0.7, epochs=70, warmup=15, batch=1024),
)
# The paper transfers DS-ViT++ by the same schedule and does not name the optimiser. Its rate of 0.7 is for
# SGD, which diverges with a transformer on digits at a batch of 256; this is AdamW at the rate of
# `transfer_rate`. The teacher is left out: it knows ImageNet's classes.
VIT = replace(
    imagenet.VIT,
    start="runs/imagenet_ds_vit_plus",
    data=DataConfig(name="cifar10", size=224),
    scheme=replace(imagenet.VIT.scheme, name="label+mvco", teacher=None),
    optim=replace(imagenet.VIT.optim, lr=1e-3, epochs=70, warmup=15, batch=1024),
)


@register_recipe
def cifar10_transfer() -> Recipe[TrainConfig]:
    """DS-MBNet from ImageNet to CIFAR-10 at 224 pixels, by the paper's schedule."""
    return Recipe(PAPER, expect="the paper has no DS-MBNet here; its DS-ResNet, with its gates: 97.8 %")


@register_recipe
def cifar100_transfer() -> Recipe[TrainConfig]:
    """DS-MBNet from ImageNet to CIFAR-100 at 224 pixels, by the paper's schedule."""
    return Recipe(
        replace(PAPER, data=DataConfig(name="cifar100", size=224)),
        expect="the paper has no DS-MBNet here; its DS-ResNet, with its gates: 86.8 %",
    )


@register_recipe
def cifar10_vit_transfer() -> Recipe[TrainConfig]:
    """DS-ViT++ from ImageNet to CIFAR-10 at 224 pixels, by the paper's schedule and AdamW."""
    return Recipe(VIT, expect="paper: 98.7 % at 5.6B multiply-adds")


@register_recipe
def cifar100_vit_transfer() -> Recipe[TrainConfig]:
    """DS-ViT++ from ImageNet to CIFAR-100 at 224 pixels, by the paper's schedule and AdamW."""
    return Recipe(
        replace(VIT, data=DataConfig(name="cifar100", size=224)), expect="paper: 90.1 % at 5.6B multiply-adds"
    )


@register_recipe
def imagenette_to_cifar10() -> Recipe[TrainConfig]:
    """DS-MBNet from Imagenette to CIFAR-10, both at 128 pixels."""
    return Recipe(
        replace(
            small.CIFAR,
            model="ds_mbnet",
            start="runs/imagenette_mbnet",
            data=DataConfig(name="cifar10", size=128),
            augment=Augment(padding=16, flip=True),  # an eighth of the side, as at 32 pixels
            scheme=replace(small.CIFAR.scheme, name="label"),
            optim=OptimConfig(lr=0.1, weight_decay=1.25e-3, epochs=12, warmup=1, batch=512),
        ),
        duration="3 minutes on an H200 that trains four more networks at the same time",
        expect="89.9 / 90.8 % at the smallest / largest route (3 seeds; from scratch 87.1 / 88.2 %)",
    )


@register_recipe
def digits_seen_mbnet() -> Recipe[TrainConfig]:
    """DS-MBNet on the digits 0 to 6, as digits_mbnet: what digits_transfer begins with."""
    return Recipe(
        replace(small.DIGITS, data=DataConfig(name="digits_0_to_6")),
        duration="21 s on two CPU cores",
        expect="98.8 / 99.6 % at the smallest / largest route (one seed, 252 test images)",
    )


@register_recipe
def digits_transfer() -> Recipe[TrainConfig]:
    """DS-MBNet from the digits 0 to 6 to the classes that it never saw, 7 to 9: 2 epochs."""
    return Recipe(
        replace(
            small.DIGITS,
            start="runs/digits_seen_mbnet",
            data=DataConfig(name="digits_7_to_9"),
            optim=replace(small.DIGITS.optim, epochs=2, batch=32),
        ),
        duration="6 s on two CPU cores, 21 s before that for digits_seen_mbnet",
        expect="96.3 / 98.1 % at the smallest / largest route (3 seeds, 107 test images; from scratch "
        "75.1 / 95.6 %)",
    )


DIGITS_VIT = small.digits_vit().config


@register_recipe
def digits_seen_vit() -> Recipe[TrainConfig]:
    """DS-ViT++ on the digits 0 to 6, as digits_vit: what digits_vit_transfer begins with."""
    return Recipe(
        replace(DIGITS_VIT, data=DataConfig(name="digits_0_to_6")),
        duration="27 s on one CPU core",
        expect="99.2 / 99.2 % at the smallest / largest route (one seed, 252 test images)",
    )


@register_recipe
def digits_vit_transfer() -> Recipe[TrainConfig]:
    """DS-ViT++ from the digits 0 to 6 to the classes that it never saw, 7 to 9: AdamW, 5 epochs."""
    return Recipe(
        replace(
            DIGITS_VIT,
            start="runs/digits_seen_vit",
            data=DataConfig(name="digits_7_to_9"),
            optim=replace(DIGITS_VIT.optim, epochs=5, warmup=1),
        ),
        duration="3 s on one CPU core, 27 s before that for digits_seen_vit",
        expect="94.4 / 94.1 % at the smallest / largest route (3 seeds, 107 test images; from scratch "
        "81.3 / 83.2 %)",
    )
