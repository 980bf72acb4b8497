"""Settings of detectors by name: the paper's, and one that is trained in minutes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dsnet.detection.config import BoxData, BoxOptim, BoxRun, DetectConfig, DetectorGate
from dsnet.detection.voc import VOC_CLASSES
from dsnet.errors import DsnetError

__all__ = ["DETECTORS", "DetectRecipe", "get_detector_recipe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectRecipe:
    """Settings, what they are for, how long that takes, and what to expect."""

    config: DetectConfig
    about: str
    duration: str
    expect: str


GPU = BoxRun(precision="bfloat16", channels_last=True)
VOC = DetectConfig(
    model="ds_mbnet",
    start="runs/imagenet_ds_mbnet",
    data=BoxData(
        root="VOCdevkit",
        train="VOC2007/trainval,VOC2012/trainval",
        test="VOC2007/test",
        classes=VOC_CLASSES,
    ),
    optim=BoxOptim(lr=0.004, epochs=300, milestones=(200, 250), batch=128),
    gate=DetectorGate(batch=128),
    run=GPU,
)
BCCD = DetectConfig(
    model="ds_mbnet",
    data=BoxData(root="BCCD"),
    optim=BoxOptim(lr=0.02, epochs=150, warmup=3, batch=32),
    gate=DetectorGate(space="S"),
    run=GPU,
)
UNMEASURED = "not measured yet"

DETECTORS = {
    "voc_ds_mbnet": DetectRecipe(
        config=VOC,
        about="the paper's FSSD on DS-MBNet, Pascal VOC 2007 + 2012, from an ImageNet run",
        duration="the paper does not say",
        expect="mAP 70.7 / 72.8 / 73.7 with gates for S / M / L (the paper)",
    ),
    "voc_ds_mbnet_plus": DetectRecipe(
        config=replace(VOC, model="ds_mbnet_plus", start="runs/imagenet_ds_mbnet_plus"),
        about="the same on DS-MBNet++",
        duration="the paper does not say",
        expect="mAP 71.2 / 73.2 / 74.1 with gates for S / M / L (the paper)",
    ),
    "bccd_ds_mbnet": DetectRecipe(
        config=BCCD,
        about="blood cells (BCCD, 364 images), DS-MBNet from nothing",
        duration=UNMEASURED,
        expect=UNMEASURED,
    ),
    "bccd_mbnet": DetectRecipe(
        config=replace(BCCD, model="mbnet", gate=DetectorGate()),
        about="blood cells, MobileNetV1, which has one route, to compare with",
        duration=UNMEASURED,
        expect=UNMEASURED,
    ),
    "bccd_ds_mbnet_plus": DetectRecipe(
        config=replace(BCCD, model="ds_mbnet_plus"),
        about="blood cells, DS-MBNet++ from nothing",
        duration=UNMEASURED,
        expect=UNMEASURED,
    ),
}


def get_detector_recipe(name: str) -> DetectRecipe:
    """By its name."""
    if name not in DETECTORS:
        raise DsnetError(f"there is no detector recipe {name!r}; possible: {', '.join(DETECTORS)}")
    return DETECTORS[name]
