"""Reference networks: MobileNetV1 and ResNet-50 at a width, and a DeiT-style transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx, nn

from dsnet.counts import Cost, Shape
from dsnet.errors import DsnetError, shorten
from dsnet.models.input_spec import InputSpec
from dsnet.models.options import check_count
from dsnet.models.registry import register_reference
from dsnet.models.static_network import PlainBlock, ReferenceNetwork, plain_cost
from dsnet.slicing import Factory
from dsnet.slicing.attention import StaticAttention

__all__ = ["DeiT", "DeiTOptions", "MobileNetV1", "ResNet50", "WidthOptions"]


def _check_factor(name: str, value: float, limit: float = 4) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= limit:
        raise DsnetError(f"{name} must be above 0 and at most {limit}, not {shorten(value)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthOptions:
    """Options of the convolutional reference networks.

    Attributes:
        width: Factor of all numbers of channels, including the stem's.
        num_classes: Number of classes.
    """

    width: float = 1.0
    num_classes: int = 1000

    def __post_init__(self) -> None:
        _check_factor("width", self.width)
        check_count("num_classes", self.num_classes)

    def scale(self, channels: int) -> int:
        """Scale a number of channels to this width."""
        return max(4, round(channels * self.width))


def _conv_norm(
    channels_in: int, channels: int, kernel: int, stride: int, factory: Factory, *, groups: int = 1
) -> list[nn.Module]:
    conv = nn.Conv2d(channels_in, channels, kernel, stride, kernel // 2, groups=groups, bias=False, **factory)
    return [conv, nn.BatchNorm2d(channels, **factory)]


def _pool_head(channels: int, num_classes: int, factory: Factory) -> nn.Sequential:
    linear = nn.Linear(channels, num_classes, **factory)
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear)


class MobileNetV1(ReferenceNetwork):
    """MobileNetV1 (Howard et al., 2017): thirteen depthwise separable blocks, ReLU.

    Args:
        options: Width and number of classes.
        factory: Device and precision of the parameters.
    """

    input_spec = InputSpec(image_size=224, stride=32)
    rows = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))

    def __init__(self, options: WidthOptions, factory: Factory) -> None:
        super().__init__()
        width = options.scale(32)
        self.stem = nn.Sequential(*_conv_norm(3, width, 3, 2, factory), nn.ReLU(inplace=True))
        blocks = []
        for channels, stride in self.rows:
            out = options.scale(channels)
            blocks.append(
                nn.Sequential(
                    *_conv_norm(width, width, 3, stride, factory, groups=width),
                    nn.ReLU(inplace=True),
                    *_conv_norm(width, out, 1, 1, factory),
                    nn.ReLU(inplace=True),
                )
            )
            width = out
        self.blocks = nn.Sequential(*blocks)
        self.head = _pool_head(width, options.num_classes, factory)
        self.reset_parameters()


class _Bottleneck(PlainBlock):
    def __init__(self, channels_in: int, channels: int, stride: int, factory: Factory) -> None:
        super().__init__()
        hidden = channels // 4
        self.branch = nn.Sequential(
            *_conv_norm(channels_in, hidden, 1, 1, factory),
            nn.ReLU(inplace=True),
            *_conv_norm(hidden, hidden, 3, stride, factory),
            nn.ReLU(inplace=True),
            *_conv_norm(hidden, channels, 1, 1, factory),
        )
        project = stride > 1 or channels_in != channels
        self.shortcut = (
            nn.Sequential(*_conv_norm(channels_in, channels, 1, stride, factory))
            if project
            else nn.Identity()
        )
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.act(self.branch(x) + self.shortcut(x)))

    def cost(self, shape: Shape) -> tuple[Cost, Shape]:
        branch, after = plain_cost(self.branch, shape)
        return branch + plain_cost(self.shortcut, shape)[0], after


class ResNet50(ReferenceNetwork):
    """ResNet-50 with the stride in the 3 × 3 convolution.

    Args:
        options: Width and number of classes.
        factory: Device and precision of the parameters.
    """

    input_spec = InputSpec(image_size=224, stride=32)
    rows = ((256, 3, 1), (512, 4, 2), (1024, 6, 2), (2048, 3, 2))

    def __init__(self, options: WidthOptions, factory: Factory) -> None:
        super().__init__()
        width = options.scale(64)
        self.stem = nn.Sequential(
            *_conv_norm(3, width, 7, 2, factory), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        blocks = []
        for channels, layers, stride in self.rows:
            out = options.scale(channels)
            for layer in range(layers):
                blocks.append(_Bottleneck(width, out, stride if layer == 0 else 1, factory))
                width = out
        self.blocks = nn.Sequential(*blocks)
        self.head = _pool_head(width, options.num_classes, factory)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialise as the supernet does: the last norm of each block starts at zero."""
        super().reset_parameters(generator)
        for block in self.blocks:
            nn.init.zeros_(cast(nn.BatchNorm2d, cast(_Bottleneck, block).branch[-1]).weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeiTOptions:
    """Sizes of the transformer; the defaults are DeiT-S.

    Attributes:
        embedding: Width of the embedding.
        heads: Number of heads.
        depth: Number of blocks.
        mlp_ratio: Hidden width of an MLP, as a multiple of the embedding.
        num_classes: Number of classes.
    """

    embedding: int = 384
    heads: int = 6
    depth: int = 12
    mlp_ratio: float = 4.0
    num_classes: int = 1000

    def __post_init__(self) -> None:
        for name in ("embedding", "heads", "depth", "num_classes"):
            check_count(name, getattr(self, name))
        _check_factor("mlp_ratio", self.mlp_ratio, limit=16)
        if self.embedding % self.heads:
            raise DsnetError(f"embedding {self.embedding} cannot be shared by {self.heads} heads")


class _Transformer(PlainBlock):
    def __init__(self, options: DeiTOptions, factory: Factory) -> None:
        super().__init__()
        width, hidden = options.embedding, int(options.embedding * options.mlp_ratio)
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=1e-6, **factory) for _ in range(2))
        qkv, proj = nn.Linear(width, 3 * width, **factory), nn.Linear(width, width, **factory)
        self.attention = StaticAttention(qkv, proj, options.heads, width // options.heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden, **factory), nn.GELU(), nn.Linear(hidden, width, **factory)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return cast(Tensor, x + self.mlp(self.norm2(x)))

    def cost(self, shape: Shape) -> tuple[Cost, Shape]:
        layers = (self.attention.qkv, self.attention.proj, self.mlp, self.norm1, self.norm2)
        products = Cost(attention=2 * shape.area**2 * shape.channels)
        return sum((plain_cost(layer, shape)[0] for layer in layers), products), shape


@fx.wrap  # so that a traced network checks its images too
def _check_size(height: int, width: int, size: int) -> None:
    if (height, width) != (size, size):
        raise DsnetError(f"this transformer takes images of {size} × {size}, not {height} × {width}")


class DeiT(ReferenceNetwork):
    """A DeiT-style transformer on patches of 16 × 16, for images of 224 × 224.

    Args:
        options: Sizes and number of classes.
        factory: Device and precision of the parameters.
    """

    input_spec = InputSpec(image_size=224, stride=16)

    def __init__(self, options: DeiTOptions, factory: Factory) -> None:
        super().__init__()
        width, patch = options.embedding, self.input_spec.stride
        self.tokens = (self.input_spec.image_size // patch) ** 2
        self.embed = nn.Conv2d(3, width, patch, patch, **factory)
        self.class_token = nn.Parameter(torch.empty(1, 1, width, **factory))
        self.positions = nn.Parameter(torch.empty(1, 1 + self.tokens, width, **factory))
        self.blocks = nn.Sequential(*(_Transformer(options, factory) for _ in range(options.depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6, **factory)
        self.head = nn.Linear(width, options.num_classes, **factory)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialise by a truncated normal of 0.02, and the classifier by one of 0.01."""
        super().reset_parameters(generator)
        linears = [m.weight for m in self.blocks.modules() if isinstance(m, nn.Linear)]
        for weight in (self.embed.weight, self.class_token, self.positions, *linears):
            nn.init.trunc_normal_(weight, std=0.02, a=-0.04, b=0.04, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits [B, classes] of images [B, 3, 224, 224]."""
        _check_size(x.shape[2], x.shape[3], self.input_spec.image_size)
        patches = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), patches], 1) + self.positions
        return cast(Tensor, self.head(self.norm(self.blocks(x)[:, 0])))

    def cost(self, image: Shape) -> Cost:
        """Compute the cost on an image of this shape."""
        _check_size(image.height, image.width, self.input_spec.image_size)
        total, shape = plain_cost(self.embed, image)
        total += Cost(params=self.class_token.numel() + self.positions.numel())
        total += plain_cost(self.blocks, Shape(shape.channels, 1 + shape.area, 1))[0]
        return total + plain_cost(nn.Sequential(self.norm, self.head), Shape(shape.channels, 1, 1))[0]


@register_reference("MobileNetV1 at a width: the reference of DS-MBNet", WidthOptions)
def mobilenet_v1(options: WidthOptions, factory: Factory) -> MobileNetV1:
    """MobileNetV1 at 224 × 224."""
    return MobileNetV1(options, factory)


@register_reference("ResNet-50 at a width: the reference of DS-ResNet", WidthOptions)
def resnet50(options: WidthOptions, factory: Factory) -> ResNet50:
    """ResNet-50 at 224 × 224."""
    return ResNet50(options, factory)


@register_reference("DeiT-style transformer: the reference of DS-ViT++", DeiTOptions)
def deit(options: DeiTOptions, factory: Factory) -> DeiT:
    """DeiT at 224 × 224; DeiT-S by default."""
    return DeiT(options, factory)
