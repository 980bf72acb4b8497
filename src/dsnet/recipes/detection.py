"""Recipes of detectors: the paper's on Pascal VOC, and blood cells, which train in minutes."""

from __future__ import annotations

from dataclasses import replace

from dsnet.detection.data.voc import VOC_CLASSES
from dsnet.detection.train.config import (
    DetectionConfig,
    DetectionDataConfig,
    DetectionOptimConfig,
    DetectionRunConfig,
    DetectorGateConfig,
)
from dsnet.recipes.registry import register_recipe

GPU = DetectionRunConfig(precision="bfloat16", channels_last=True)
VOC = DetectionConfig(
    model="ds_mbnet",
    start="runs/imagenet_ds_mbnet",
    data=DetectionDataConfig(
        root="VOCdevkit",
        train="VOC2007/trainval,VOC2012/trainval",
        test="VOC2007/test",
        classes=VOC_CLASSES,
    ),
    optim=DetectionOptimConfig(lr=0.004, epochs=300, milestones=(200, 250), batch=128),
    gate=DetectorGateConfig(batch=128),
    run=GPU,
)
BCCD = DetectionConfig(
    model="ds_mbnet",
    data=DetectionDataConfig(root="BCCD"),
    optim=DetectionOptimConfig(lr=0.02, epochs=150, warmup=3, batch=32),
    gate=DetectorGateConfig(space="S"),
    run=GPU,
)


@register_recipe
def voc_ds_mbnet() -> DetectionConfig:
    """The paper's FSSD on DS-MBNet, Pascal VOC 2007 + 2012, from an ImageNet run.

    Duration: the paper does not say
    Expect: mAP 70.7 / 72.8 / 73.7 with gates for S / M / L (the paper)
    """
    return VOC


@register_recipe
def voc_ds_mbnet_plus() -> DetectionConfig:
    """The same on DS-MBNet++.

    Duration: the paper does not say
    Expect: mAP 71.2 / 73.2 / 74.1 with gates for S / M / L (the paper)
    """
    return replace(VOC, model="ds_mbnet_plus", start="runs/imagenet_ds_mbnet_plus")


@register_recipe
def bccd_ds_mbnet() -> DetectionConfig:
    """Blood cells (BCCD, 364 images), DS-MBNet from random weights.

    Duration: over 2 minutes on an H200: 1,350 steps of 38 ms, then figures of all routes and the gate
    Expect: mAP (VOC 2007) 84.4 to 84.8 ± 1.8 % at all routes (2 seeds, 72 test images)
    """
    return BCCD


@register_recipe
def bccd_mbnet() -> DetectionConfig:
    """Blood cells, MobileNetV1, which has one route, to compare with.

    Duration: 70 to 95 s on an H200 that trains three to five more at the same time
    Expect: mAP (VOC 2007) 83.8 ± 0.7 % (3 seeds, 72 test images)
    """
    return replace(BCCD, model="mbnet", gate=DetectorGateConfig())


@register_recipe
def bccd_ds_mbnet_plus() -> DetectionConfig:
    """Blood cells, DS-MBNet++ from random weights.

    Duration: as bccd_ds_mbnet
    Expect: mAP (VOC 2007) 84.5 to 85.2 % at all routes (one seed, 72 test images)
    """
    return replace(BCCD, model="ds_mbnet_plus")
