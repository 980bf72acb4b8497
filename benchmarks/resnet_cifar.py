"""The residual network of He et al. for CIFAR-10, for ``--import benchmarks.resnet_cifar``.

Shortcuts between stages subsample the maps and pad the channels with zeros. Weights have the names of
`pytorch_resnet_cifar10`'s files.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dsnet.models.convert import register_network


class _Block(nn.Module):
    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.stride, self.pad = (2 if width > width_in else 1), (width - width_in) // 2
        self.conv1 = nn.Conv2d(width_in, width, 3, self.stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride > 1:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad))
        return F.relu(branch + x)


class ResNet(nn.Module):
    """Three stages of 16, 32 and 64 channels with ``blocks`` blocks each."""

    def __init__(self, blocks: int, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        stages = [
            nn.Sequential(_Block(width_in, width), *(_Block(width, width) for _ in range(blocks - 1)))
            for width_in, width in ((16, 16), (16, 32), (32, 64))
        ]
        self.layer1, self.layer2, self.layer3 = stages
        self.linear = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))


@register_network
def resnet56_cifar(num_classes: int = 10) -> nn.Module:
    """ResNet-56 for images of 32 pixels."""
    return ResNet(9, num_classes)
