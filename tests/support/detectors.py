"""Detectors with random weights."""

from __future__ import annotations

import functools

import torch

from dsnet.detection.model.fssd import Detector, FssdTable
from tests.support import randomise
from tests.support.networks import network

TABLE = FssdTable(strides=(2, 4), project=8, pyramid=(12, 16), ratios=((2.0,), (2.0, 3.0)))


@functools.cache
def detector(name: str) -> Detector:
    made = Detector(network(name, torch.float64), 3, TABLE).eval()
    for part in (made.projections, made.norm, made.pyramid, made.places, made.kinds):
        randomise(part, seed=3)
    return made.requires_grad_(False)


NAMES = ["ds_mbnet_tiny", "ds_mbnet_plus_tiny"]
