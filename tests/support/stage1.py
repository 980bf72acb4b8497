"""Steps of Stage I on random networks."""

from __future__ import annotations

import torch
from torch import Tensor

import dsnet
from dsnet.training import Average, Projector, Scheme, Stage1
from tests.support import images, randomise

KINDS = ["ds_mbnet_tiny", "ds_resnet_tiny", "ds_vit_plus_tiny"]


SCHEMES = [
    "label",
    "id",
    "ib",
    "e-ib",
    "h-ib",
    "e-ib+h-ib",
    "ib+mvco",
    "h-ib+mvco",
    "id+label",
    "ib+label",
    "ed",
    "ed+mvco",
]


def setting(name: str, text: str) -> tuple[dsnet.Supernet, Stage1, tuple, list[Tensor], Tensor]:
    """A random network, a stage whose average differs from it, routes, views and labels."""
    model = randomise(dsnet.create_model(name, dtype=torch.float64), seed=1).train()
    scheme = Scheme.parse(text)
    average = projector = teacher = None
    if scheme.uses_average:
        average = Average(randomise(dsnet.create_model(name, dtype=torch.float64), seed=2))
    if scheme.hierarchical:
        projector = randomise(Projector.of(model, "all"), seed=3)
    if scheme.external is not None:
        frozen = randomise(dsnet.create_model(name, dtype=torch.float64), seed=4).requires_grad_(False)
        teacher = frozen.bind(frozen.space.largest)
    stage = Stage1(scheme=scheme, average=average, projector=projector, teacher=teacher, smoothing=0.1)
    routes = scheme.draw(model.space, 2, torch.Generator().manual_seed(0))
    views = [images(model, 6, seed=10 + i) for i in range(scheme.views(len(routes)))]
    return model, stage, routes, views, torch.tensor([0, 1, 2, 3, 4, 5])
