"""External teachers: the largest route of a run, or a pretrained network of timm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsnet.errors import DsnetError
from dsnet.models.convert.sources import timm_network
from dsnet.models.loading import build_network, load_classifier

__all__ = ["Channels", "Teacher", "load_teacher"]

Channels = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of every channel."""


class Teacher(nn.Module):
    """A frozen network that takes images normalised for the student.

    Args:
        network: The network.
        seen: Mean and standard deviation by which the student's images are normalised.
        expected: Those that the network expects.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, network: nn.Module, *, seen: Channels, expected: Channels) -> None:
        super().__init__()
        self.network = network.eval().requires_grad_(False)
        (mean, std), (to_mean, to_std) = ((torch.tensor(v) for v in pair) for pair in (seen, expected))
        self.register_buffer("scale", (std / to_std)[:, None, None])
        self.register_buffer("shift", ((mean - to_mean) / to_std)[:, None, None])
        self.eval()

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Compute logits [B, classes] of images normalised for the student."""
        logits: Tensor = self.network(x * self.scale + self.shift)
        return logits


def load_teacher(name: str, *, classes: int, seen: Channels, device: torch.device | str) -> Teacher:
    """Load a teacher.

    Args:
        name: ``timm:NAME``, or the folder of a run.
        classes: Number of classes of the data.
        seen: Mean and standard deviation by which the student's images are normalised.
        device: Device of the teacher.

    Raises:
        DsnetError: The teacher cannot be loaded, or has another number of classes.
    """
    if name.startswith("timm:"):
        network, expected, has = _from_timm(name.removeprefix("timm:"))
    else:
        network, expected, has = _from_run(Path(name))
    if has != classes:
        raise DsnetError(f"the teacher {name} has {has} classes, the data has {classes}")
    return Teacher(network, seen=seen, expected=expected).to(device)


def _from_run(folder: Path) -> tuple[nn.Module, Channels, int]:
    saved = load_classifier(folder)
    known = saved.data.get("input")
    if known is None:
        raise DsnetError(f"{folder} does not say how its images were normalised; `dsnet recalibrate` adds it")
    model = build_network(saved)
    route = (
        model.space.largest if saved.data.get("route") is None else model.space.resolve(saved.data["route"])
    )
    return model.bind(route), (tuple(known["mean"]), tuple(known["std"])), model.head.classifier.out_features


def _from_timm(name: str) -> tuple[nn.Module, Channels, int]:
    network = timm_network(name, pretrained=True)
    config: Any = network.pretrained_cfg
    return network, (tuple(config["mean"]), tuple(config["std"])), int(config["num_classes"])
