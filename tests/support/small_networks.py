"""Small networks of plain torch layers to convert, in full and built narrower by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsnet.models import Supernet
from dsnet.slicing import SplitBatchNorm2d

CLASSES = 5


@torch.no_grad()
def randomise_module(network: nn.Module, seed: int = 0) -> nn.Module:
    """Draw all weights and statistics; scales and variances lie in [0.5, 1.5], those of all keys differ."""
    generator = torch.Generator().manual_seed(seed)

    def normal(like: Tensor, scale: float) -> Tensor:
        return scale * torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)

    def positive(like: Tensor) -> Tensor:
        return 0.5 + torch.rand(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)

    for name, parameter in network.named_parameters():
        if parameter.dim() > 1 and parameter.shape[0] > 1:
            parameter.copy_(normal(parameter, (2 / parameter[0].numel()) ** 0.5))
        elif parameter.dim() == 1 and name.endswith("weight"):
            parameter.copy_(positive(parameter))
        else:  # biases, positions, class tokens, layer scales
            parameter.copy_(normal(parameter, 0.3))
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
            assert module.running_var is not None
            module.running_mean.copy_(normal(module.running_mean, 0.3))
            module.running_var.copy_(positive(module.running_var))
        elif isinstance(module, SplitBatchNorm2d):
            for key in range(module.keys):
                module.set_statistics(key, normal(module.mean[key], 0.3), positive(module.var[key]), 1)
    return network


def random_images(batch: int, size: int = 16, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draw images [B, 3, size, size]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, size, size, generator=generator, dtype=torch.float64).to(dtype)


def converted_layer(model: Supernet, name: str) -> nn.Module:
    """Return the layer of a converted network that had this name in the original."""
    suffix = f".body.{name}"
    found = [m for n, m in model.named_modules() if n.endswith(suffix)]
    if not found and isinstance(model.head.classifier, nn.Module):
        found = [model.head.classifier]
    (layer,) = found
    return layer


# --- convolutions -----------------------------------------------------------------------------------------
def conv_norm(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


def plain_cnn(share: float = 1.0, widths: tuple[int, int] | None = None) -> nn.Sequential:
    """Four convolutions; the gate is behind the second. ``widths`` are those behind the gate."""
    third, fourth = widths or (int(24 * share), int(16 * share))
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, 1, 1, bias=False),
        nn.BatchNorm2d(12),
        nn.SiLU(),
        nn.Conv2d(12, third, 3, 2, 1),
        nn.BatchNorm2d(third),
        nn.ReLU(),
        nn.Conv2d(third, fourth, 3, 1, 1),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(fourth, CLASSES),
    )


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, hidden: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.conv2 = conv_norm(inputs, hidden, 3, stride), conv_norm(hidden, outputs)
        project = stride > 1 or inputs != outputs
        self.shortcut = conv_norm(inputs, outputs, 1, stride) if project else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.relu(self.conv1(x)))
        y += self.shortcut(x)
        return F.relu(y)


class ResidualNet(nn.Module):
    """Residual blocks, the second with a projection; the gate is behind the first.

    Args:
        share: Of the hidden channels behind the gate.
        stream: Of the channels of the stream behind the gate.
        blocks: Number of blocks.
    """

    def __init__(self, share: float = 1.0, stream: float = 1.0, blocks: int = 5) -> None:
        super().__init__()
        hidden, outputs, self.entry = int(24 * share), int(16 * stream), int(8 * stream)
        self.stem = conv_norm(3, 8, 3, 2)
        self.blocks = nn.ModuleList(
            [ResidualBlock(8, 8, 12), ResidualBlock(self.entry, outputs, hidden, 2)]
            + [ResidualBlock(outputs, outputs, hidden) for _ in range(blocks - 2)]
        )
        self.fc = nn.Linear(outputs, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = self.blocks[0](x)[:, : self.entry]
        for block in self.blocks[1:]:
            x = block(x)
        return self.fc(x.mean((2, 3)))


class SqueezeExcitation(nn.Module):
    def __init__(self, channels: int, reduced: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, reduced, 1), nn.Conv2d(reduced, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.expand(F.silu(self.reduce(x.mean((2, 3), keepdim=True))))
        return x * scale.sigmoid()


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, hidden: int, reduced: int, stride: int) -> None:
        super().__init__()
        self.expand, self.project = conv_norm(inputs, hidden, 1), conv_norm(hidden, outputs, 1)
        self.depthwise = conv_norm(hidden, hidden, 3, stride, groups=hidden)
        self.se = SqueezeExcitation(hidden, reduced)
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self.depthwise(F.relu6(self.expand(x))))
        y = self.project(self.se(y))
        return x + y if self.adds else y


class DepthwiseNet(nn.Module):
    """Depthwise convolutions with squeeze-and-excitation; the gate is behind the first block."""

    def __init__(self, share: float = 1.0) -> None:
        super().__init__()
        hidden, reduced, last = int(28 * share), int(8 * share), int(20 * share)
        self.stem = nn.Sequential(conv_norm(3, 8, 3, 2), nn.Hardswish())
        self.blocks = nn.Sequential(
            InvertedResidual(8, 8, 16, 4, 1),
            InvertedResidual(8, 12, hidden, reduced, 2),
            InvertedResidual(12, 12, hidden, reduced, 1),
        )
        self.conv_head = nn.Sequential(conv_norm(12, last, 1), nn.Hardswish())
        self.pool, self.classifier = nn.AdaptiveAvgPool2d(1), nn.Linear(last, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.conv_head(self.blocks(self.stem(x))))
        return self.classifier(x.flatten(1))


class GroupedBlock(nn.Module):
    def __init__(self, channels: int, groups: int, per_group: int) -> None:
        super().__init__()
        hidden = groups * per_group
        self.first, self.last = conv_norm(channels, hidden, 1), conv_norm(hidden, channels, 1)
        self.grouped = conv_norm(hidden, hidden, 3, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.grouped(F.relu(self.first(x))))
        return F.relu(x + self.last(y))


class GroupedNet(nn.Module):
    """Grouped convolutions, as in ResNeXt; the gate is behind the first block."""

    def __init__(self, share: float = 1.0) -> None:
        super().__init__()
        groups = int(4 * share)
        self.stem = conv_norm(3, 8, 3, 2)
        self.blocks = nn.Sequential(
            GroupedBlock(8, 4, 3), GroupedBlock(8, groups, 3), GroupedBlock(8, groups, 5)
        )
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.adaptive_avg_pool2d(self.blocks(F.relu(self.stem(x))), 1).flatten(1))


class Branches(nn.Module):
    def __init__(self, inputs: int, wide: int, slim: int, outputs: int) -> None:
        super().__init__()
        self.wide, self.slim = conv_norm(inputs, wide, 3), conv_norm(inputs, slim, 1)
        self.mix = conv_norm(wide + slim, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.mix(torch.cat([F.relu(self.wide(x)), F.relu(self.slim(x))], 1)))


class ConcatNet(nn.Module):
    """Branches that are concatenated; the gate is behind the first block."""

    def __init__(self, share: float = 1.0) -> None:
        super().__init__()
        wide, slim, outputs = (int(n * share) for n in (12, 8, 16))
        self.stem = conv_norm(3, 8, 3, 2)
        self.blocks = nn.Sequential(
            Branches(8, 8, 4, 10), Branches(10, wide, slim, outputs), Branches(outputs, wide, slim, outputs)
        )
        self.fc = nn.Linear(outputs, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


# --- transformers and layer norm --------------------------------------------------------------------------
class Attention(nn.Module):
    """Attention with one layer for Q, K and V; with ``fused`` by torch's function, otherwise step by step."""

    def __init__(self, features: int, heads: int, head_dim: int, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.head_dim, self.fused = heads, head_dim, fused
        self.qkv = nn.Linear(features, 3 * heads * head_dim)
        self.proj = nn.Linear(heads * head_dim, features)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = (q * self.head_dim**-0.5 @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(batch, tokens, self.heads * self.head_dim))


class TransformerBlock(nn.Module):
    def __init__(self, features: int, heads: int, head_dim: int, hidden: int, *, fused: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.attention = Attention(features, heads, head_dim, fused=fused)
        self.mlp = nn.Sequential(nn.Linear(features, hidden), nn.GELU(), nn.Linear(hidden, features))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TinyViT(nn.Module):
    """A transformer with a class token for images of 16 × 16; the gate is behind the first block."""

    def __init__(self, share: float = 1.0, *, fused: bool = True) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.class_token = nn.Parameter(torch.zeros(1, 1, 16))
        self.positions = nn.Parameter(torch.zeros(1, 17, 16))
        heads, hidden = int(4 * share), int(24 * share)
        first = TransformerBlock(16, 4, 4, 24, fused=fused)
        rest = [TransformerBlock(16, heads, 4, hidden, fused=fused) for _ in range(2)]
        self.blocks = nn.Sequential(first, *rest)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class ChannelsLastBlock(nn.Module):
    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 5, 1, 2, groups=channels)
        self.norm, self.gamma = nn.LayerNorm(channels), nn.Parameter(torch.ones(channels))
        self.fc1, self.fc2 = nn.Linear(channels, hidden), nn.Linear(hidden, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.gamma * self.fc2(F.gelu(self.fc1(y)))
        return x + y.permute(0, 3, 1, 2)


class ChannelsLastNet(nn.Module):
    """Layer norms over channels, as in ConvNeXt; the gate is behind the first block."""

    def __init__(self, share: float = 1.0) -> None:
        super().__init__()
        hidden = int(24 * share)
        self.stem = nn.Conv2d(3, 8, 2, 2)
        self.blocks = nn.ModuleList(
            [ChannelsLastBlock(8, 24), ChannelsLastBlock(8, hidden), ChannelsLastBlock(8, hidden)]
        )
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean((2, 3))))


# --- the table --------------------------------------------------------------------------------------------
Narrow = Callable[[str, Tensor, Sequence[int]], Tensor]


def first_ones(name: str, full: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the first entries along each dimension."""
    return full[tuple(slice(0, n) for n in shape)]


def _behind_concatenation(name: str, full: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the first columns of both branches for a layer that reads a concatenation."""
    if name.startswith("blocks.0") or ".mix.0.weight" not in name:
        return first_ones(name, full, shape)
    wide, slim = full[:, :12], full[:, 12:]
    columns = torch.cat([wide[:, : shape[1] * 3 // 5], slim[:, : shape[1] * 2 // 5]], 1)
    return columns[: shape[0]]


def _of_heads(name: str, full: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the first heads of Q, of K and of V."""
    if ".qkv." not in name:
        return first_ones(name, full, shape)
    heads = full.unflatten(0, (3, 4, 4))[:, : shape[0] // 12]
    return heads.flatten(0, 2)


def cut_to(network: nn.Module, full: nn.Module, narrow: Narrow = first_ones) -> nn.Module:
    """Give a narrow network the weights of the full one, cut by ``narrow``."""
    given = full.state_dict()
    state = {
        name: narrow(name, given[name], tensor.shape) if tensor.ndim else given[name]
        for name, tensor in network.state_dict().items()
    }
    network.double().load_state_dict(state)
    return network.eval()


@dataclass(frozen=True)
class SmallNetwork:
    """A network to convert.

    Attributes:
        build: Builds the network with a share of the hidden channels behind the gate.
        gate: Name of the module behind which the gate is.
        narrow: Cuts a weight of the full network to a shape: (name, weight, shape) → weight.
    """

    build: Callable[[float], nn.Module]
    gate: str
    narrow: Narrow = first_ones

    def full(self, seed: int = 0) -> nn.Module:
        """Build the full network with random weights in float64 and eval mode."""
        return randomise_module(self.build(1.0).double(), seed).eval()

    def narrowed(self, full: nn.Module, share: float) -> nn.Module:
        """Build the network with a share of the hidden channels, the first ones of the full network."""
        return cut_to(self.build(share), full, self.narrow)


SMALL_NETWORKS = {
    "plain": SmallNetwork(plain_cnn, "3"),
    "residual": SmallNetwork(ResidualNet, "blocks.0"),
    "depthwise": SmallNetwork(DepthwiseNet, "blocks.0"),
    "grouped": SmallNetwork(GroupedNet, "blocks.0"),
    "concatenated": SmallNetwork(ConcatNet, "blocks.0", _behind_concatenation),
    "transformer": SmallNetwork(TinyViT, "blocks.0", _of_heads),
    "transformer_in_steps": SmallNetwork(lambda share: TinyViT(share, fused=False), "blocks.0", _of_heads),
    "channels_last": SmallNetwork(ChannelsLastNet, "blocks.0"),
}
