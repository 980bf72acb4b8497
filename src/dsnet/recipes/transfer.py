"""Recipes that begin with another run: ``start`` is its folder, and the recipe of that name trains it.

They do what ``dsnet transfer`` does up to the gate; ``dsnet gate NEW --set start=OLD`` transfers that too.
"""

from __future__ import annotations

from dataclasses import replace

from dsnet.data.transforms.augment import Augment
from dsnet.recipes import imagenet, small
from dsnet.recipes.registry import register_recipe
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
def cifar10_transfer() -> TrainConfig:
    """DS-MBNet from ImageNet to CIFAR-10 at 224 pixels, by the paper's schedule.

    Expect: the paper has no DS-MBNet here; its DS-ResNet, with its gates: 97.8 %
    """
    return PAPER


@register_recipe
def cifar100_transfer() -> TrainConfig:
    """DS-MBNet from ImageNet to CIFAR-100 at 224 pixels, by the paper's schedule.

    Expect: the paper has no DS-MBNet here; its DS-ResNet, with its gates: 86.8 %
    """
    return replace(PAPER, data=DataConfig(name="cifar100", size=224))


@register_recipe
def cifar10_vit_transfer() -> TrainConfig:
    """DS-ViT++ from ImageNet to CIFAR-10 at 224 pixels, by the paper's schedule and AdamW.

    Expect: paper: 98.7 % at 5.6B multiply-adds
    """
    return VIT


@register_recipe
def cifar100_vit_transfer() -> TrainConfig:
    """DS-ViT++ from ImageNet to CIFAR-100 at 224 pixels, by the paper's schedule and AdamW.

    Expect: paper: 90.1 % at 5.6B multiply-adds
    """
    return replace(VIT, data=DataConfig(name="cifar100", size=224))


@register_recipe
def imagenette_to_cifar10() -> TrainConfig:
    """DS-MBNet from Imagenette to CIFAR-10, both at 128 pixels.

    Duration: 3 minutes on an H200 that trains four more networks at the same time
    Expect: 89.9 / 90.8 % at the smallest / largest route (3 seeds; from scratch 87.1 / 88.2 %)
    """
    return replace(
        small.CIFAR,
        model="ds_mbnet",
        start="runs/imagenette_mbnet",
        data=DataConfig(name="cifar10", size=128),
        augment=Augment(padding=16, flip=True),  # an eighth of the side, as at 32 pixels
        scheme=replace(small.CIFAR.scheme, name="label"),
        optim=OptimConfig(lr=0.1, weight_decay=1.25e-3, epochs=12, warmup=1, batch=512),
    )


@register_recipe
def digits_seen_mbnet() -> TrainConfig:
    """DS-MBNet on the digits 0 to 6, as digits_mbnet: what digits_transfer begins with.

    Duration: 21 s on two CPU cores
    Expect: 98.8 / 99.6 % at the smallest / largest route (one seed, 252 test images)
    """
    return replace(small.DIGITS, data=DataConfig(name="digits_0_to_6"))


@register_recipe
def digits_transfer() -> TrainConfig:
    """DS-MBNet from the digits 0 to 6 to the classes that it never saw, 7 to 9: 2 epochs.

    Duration: 6 s on two CPU cores, 21 s before that for digits_seen_mbnet
    Expect: 96.3 / 98.1 % at the smallest / largest route (3 seeds, 107 test images; from scratch 75.1 /
        95.6 %)
    """
    return replace(
        small.DIGITS,
        start="runs/digits_seen_mbnet",
        data=DataConfig(name="digits_7_to_9"),
        optim=replace(small.DIGITS.optim, epochs=2, batch=32),
    )


DIGITS_VIT = small.digits_vit()


@register_recipe
def digits_seen_vit() -> TrainConfig:
    """DS-ViT++ on the digits 0 to 6, as digits_vit: what digits_vit_transfer begins with.

    Duration: 27 s on one CPU core
    Expect: 99.2 / 99.2 % at the smallest / largest route (one seed, 252 test images)
    """
    return replace(DIGITS_VIT, data=DataConfig(name="digits_0_to_6"))


@register_recipe
def digits_vit_transfer() -> TrainConfig:
    """DS-ViT++ from the digits 0 to 6 to the classes that it never saw, 7 to 9: AdamW, 5 epochs.

    Duration: 3 s on one CPU core, 27 s before that for digits_seen_vit
    Expect: 94.4 / 94.1 % at the smallest / largest route (3 seeds, 107 test images; from scratch 81.3 /
        83.2 %)
    """
    return replace(
        DIGITS_VIT,
        start="runs/digits_seen_vit",
        data=DataConfig(name="digits_7_to_9"),
        optim=replace(DIGITS_VIT.optim, epochs=5, warmup=1),
    )
