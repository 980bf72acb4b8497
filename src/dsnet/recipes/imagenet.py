"""The paper's ImageNet runs at their true settings ("Training details").

None of them has been run with this package: the accuracies are the paper's. Its learning rates belong to the
sum of the networks' losses. 10,000 training images are held out.
"""

from __future__ import annotations

from dataclasses import replace

from dsnet.data.transforms.augment import Augment
from dsnet.recipes.registry import register_recipe
from dsnet.training.config import (
    DataConfig,
    MixConfig,
    OptimConfig,
    RunConfig,
    SchemeConfig,
    TrainConfig,
)

DATA = DataConfig(name="imagenet", crop_ratio=0.875, hold_out=10_000 / 1_281_167)  # 256, then 224 pixels
RUN = RunConfig(precision="bfloat16", channels_last=True, validate_every=5)
AUTO = Augment(crop=(0.08, 1.0), flip=True, policy="autoaugment_imagenet")
DEIT = Augment(
    crop=(0.08, 1.0),
    flip=True,
    policy="randaugment",
    magnitude=9.0,
    magnitude_std=0.5,
    erase=0.25,
    erase_fill="noise",
)
CNN = TrainConfig(
    data=DATA,
    augment=AUTO,
    scheme=SchemeConfig(name="e-ib", random=2, alpha=0.997, alpha_warmup=False, smoothing=0.1, add=True),
    optim=OptimConfig(lr=0.08, epochs=150, warmup=5, batch=512),
    run=RUN,
)


@register_recipe
def imagenet_ds_mbnet() -> TrainConfig:
    """DS-MBNet on ImageNet: E-IB, 150 epochs.

    Expect: paper: smallest 69.2 %, largest 75.9 %; with its gate 70.1 / 72.8 / 74.5 % (S, M, L)
    """
    return replace(CNN, model="ds_mbnet")


@register_recipe
def imagenet_ds_mbnet_hib() -> TrainConfig:
    """DS-MBNet+ on ImageNet: the space of DS-MBNet, trained with H-IB + MvCo.

    Expect: paper: smallest 70.2 %, largest 76.1 %
    """
    return replace(CNN, model="ds_mbnet", scheme=replace(CNN.scheme, name="h-ib+mvco"))


@register_recipe
def imagenet_ds_mbnet_plus() -> TrainConfig:
    """DS-MBNet++ on ImageNet: H-IB + MvCo, 150 epochs.

    Expect: paper: smallest 70.3 %, largest 76.5 %; with its gate 70.8 / 73.2 / 74.8 % (S, M, L)
    """
    return replace(CNN, model="ds_mbnet_plus", scheme=replace(CNN.scheme, name="h-ib+mvco"))


@register_recipe
def imagenet_ds_mbnet_label() -> TrainConfig:
    """DS-MBNet on ImageNet by labels alone: the two-stage side of the paper's ablation of stages.

    Expect: paper: smallest 64.3 %, largest 74.1 %
    """
    return replace(CNN, model="ds_mbnet", scheme=replace(CNN.scheme, name="label"))


@register_recipe
def imagenet_ds_mbnet_joint() -> TrainConfig:
    """DS-MBNet on ImageNet, gate and weights together: the single-stage side of that ablation.

    All settings but ``scheme.joint`` are those of imagenet_ds_mbnet_label.

    Expect: paper: smallest 0.2 %, largest 28.9 %, gated 64.6 % at 255M multiply-adds
    """
    two_stages = imagenet_ds_mbnet_label()
    return replace(two_stages, scheme=replace(two_stages.scheme, joint="gumbel"))


@register_recipe
def imagenet_guideline1() -> TrainConfig:
    """Guideline I on ImageNet: MobileNetV1's third stage as 1 or 6 layers that add to each other.

    50,000 steps as in the paper, which does not state the rest. ``options.join=naive`` is its second row,
    ``scheme.route=0`` and ``1`` are its stand-alone networks.

    Expect: paper: 48.3 / 53.2 % (1 / 6 layers); naive 46.1 / 50.0 %; stand-alone 47.4 / 50.7 %
    """
    scheme = SchemeConfig(name="label", random=0, smoothing=0.1, add=True)
    return replace(
        CNN, model="mbnet_depth", scheme=scheme, optim=replace(CNN.optim, lr=0.2, epochs=20, warmup=1)
    )


@register_recipe
def imagenet_ds_resnet() -> TrainConfig:
    """DS-ResNet on ImageNet: E-IB, 150 epochs.

    Expect: paper, with its gates: 74.6 / 76.1 / 76.6 % (S, M, L)
    """
    return replace(CNN, model="ds_resnet", optim=replace(CNN.optim, lr=0.2))


@register_recipe
def imagenet_ds_resnet_plus() -> TrainConfig:
    """DS-ResNet++ on ImageNet: H-IB + MvCo, 150 epochs.

    Expect: paper, with its gate: 75.0 / 76.4 / 76.8 % (S, M, L)
    """
    scheme = replace(CNN.scheme, name="h-ib+mvco")
    return replace(CNN, model="ds_resnet_plus", scheme=scheme, optim=replace(CNN.optim, lr=0.2))


VIT = TrainConfig(
    model="ds_vit_plus",
    data=DATA,
    augment=DEIT,
    mix=MixConfig(mixup=0.8, cutmix=1.0),
    scheme=SchemeConfig(
        name="ed+mvco", random=1, teacher="timm:regnety_160.deit_in1k", smoothing=0.1, drop_path=0.1
    ),
    optim=OptimConfig(kind="adamw", lr=1e-3, weight_decay=0.05, epochs=300, warmup=5, batch=1024),
    run=RUN,
)


@register_recipe
def imagenet_ds_vit_plus() -> TrainConfig:
    """DS-ViT++ on ImageNet: ED + MvCo with RegNetY-16GF as the teacher, 300 epochs.

    Expect: paper, with its gate: 78.2 / 79.6 / 82.1 / 83.0 % (Ti, S, M, L)
    """
    return VIT


@register_recipe
def imagenet_ds_vit_plus_ablation() -> TrainConfig:
    """DS-ViT++ on ImageNet as in the paper's ablation of schemes: 100 epochs, RegNetY-12GF.

    Expect: paper: smallest 75.5 %, largest 81.5 %; its other rows by scheme.name (label: 74.4 / 81.4 %)
    """
    scheme = replace(VIT.scheme, teacher="timm:regnety_120.pycls_in1k")
    return replace(VIT, scheme=scheme, optim=replace(VIT.optim, epochs=100))
