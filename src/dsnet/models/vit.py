"""DS-ViT++: a vision transformer sliced in embedding, heads, MLP and depth by one gate.

The routes go through the paper's Table 6 ("Routing space of DS-ViT++") from its smallest to its largest
entry. The gate sits between a light convolutional stem and the patch projection, so that it can decide on the
embedding.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor, nn

from dsnet.counts import Cost, Shape
from dsnet.models.blocks import Block, Step, drop_branch, drop_features
from dsnet.models.conv_blocks import ConvNormAct, ConvSpec, SeparableBlock, separable_steps
from dsnet.models.heads import Head
from dsnet.models.input_spec import InputSpec
from dsnet.models.options import GateOptions
from dsnet.models.registry import register_supernet
from dsnet.models.supernet import Supernet
from dsnet.routes import RouteSpace, Slice
from dsnet.slicing import (
    Factory,
    Mode,
    SlicedAttention,
    SlicedLayerNorm,
    SlicedLinear,
    SlicedMLP,
    SlicedPatchEmbed,
)
from dsnet.slicing.static import traced

__all__ = ["TransformerBlock", "ViT", "ViTTable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ViTTable:
    """The architecture of a DS-ViT++."""

    input_spec: InputSpec
    num_classes: int
    stem_width: int
    stem_kernel: int
    stem_stride: int
    patch: int  # size of a patch of the stem's features
    routes: tuple[tuple[Slice, ...], ...]  # cheapest first, one slice each
    narrowings: tuple[tuple[str, tuple[int, ...]], ...] = ()


class Embedding(Block):
    """Patch projection, class token and positions."""

    makes_tokens = True

    def __init__(self, channels: int, width: int, patch: int, grid: int, factory: Factory) -> None:
        super().__init__()
        self.stride = patch
        self.tokens = SlicedPatchEmbed(channels, width, patch=patch, grid=grid, **factory)

    def forward(self, x: Tensor, size: Slice, key: int = 0, mode: Mode | None = None) -> Tensor:
        """Embed features [B, C, H, W] as tokens [B, N, E]."""
        return cast(Tensor, self.tokens(x, size.width))

    def cost(self, shape: Shape, size: Slice) -> tuple[Cost, Shape]:
        """Compute the cost and the shape of the tokens."""
        return self.tokens.cost(shape, size.width)

    def extract(self, shape: Shape, size: Slice, key: int, *, fold_bn: bool) -> nn.Module:
        """Extract the embedding, with positions resized for this shape."""
        return self.tokens.extract(shape, size.width)


class TransformerBlock(Block):
    """Pre-norm attention and MLP, each with a shortcut."""

    def __init__(self, size: Slice, factory: Factory, *, share: float) -> None:
        super().__init__()
        self.share = share  # of the stochastic depth rate
        heads, head_dim, hidden = _inner_sizes(size)
        self.norm1 = SlicedLayerNorm(size.width, **factory)
        self.attention = SlicedAttention(size.width, heads, head_dim, **factory)
        self.norm2 = SlicedLayerNorm(size.width, **factory)
        self.mlp = SlicedMLP(size.width, hidden, **factory)

    def forward(self, x: Tensor, size: Slice, key: int = 0, mode: Mode | None = None) -> Tensor:
        """Run at this size."""
        heads, head_dim, hidden = _inner_sizes(size)
        x = x + drop_branch(self.attention(self.norm1(x), heads, head_dim), mode, self.share)
        return x + drop_branch(self.mlp(self.norm2(x), hidden), mode, self.share)

    def cost(self, shape: Shape, size: Slice) -> tuple[Cost, Shape]:
        """Compute the cost; the shape does not change."""
        heads, head_dim, hidden = _inner_sizes(size)
        cost = self.attention.cost(size.width, heads, head_dim, shape.area)
        cost += self.mlp.cost(size.width, hidden, shape.area)
        return cost + self.norm1.cost(size.width) + self.norm2.cost(size.width), shape

    def extract(self, shape: Shape, size: Slice, key: int, *, fold_bn: bool) -> nn.Module:
        """Extract the block."""
        heads, head_dim, hidden = _inner_sizes(size)
        attention = self.attention.extract(size.width, heads, head_dim)
        return traced(
            _PreNorm(
                nn.Sequential(self.norm1.extract(size.width), attention),
                nn.Sequential(self.norm2.extract(size.width), self.mlp.extract(size.width, hidden)),
            )
        )


class _PreNorm(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return cast(Tensor, x + self.mlp(x))


class TokenHead(Head):
    """Norm and classifier on the class token."""

    def __init__(self, width: int, num_classes: int, factory: Factory) -> None:
        super().__init__()
        self.norm = SlicedLayerNorm(width, **factory)
        self.classifier = SlicedLinear(width, num_classes, init_std=0.01, **factory)

    def forward(self, x: Tensor, size: Slice, key: int = 0, mode: Mode | None = None) -> Tensor:
        """Compute logits [B, classes] of tokens [B, N, E]."""
        return cast(Tensor, self.classifier(drop_features(self.norm(self.pool(x)), mode)))

    def pool(self, x: Tensor) -> Tensor:
        """Return the class token before the norm."""
        return x[:, 0]

    def cost(self, shape: Shape, size: Slice) -> tuple[Cost, Shape]:
        """Compute the cost and the shape of the logits."""
        classes = self.classifier.out_features
        cost = self.classifier.cost(shape.channels, classes) + self.norm.cost(shape.channels)
        return cost, Shape(classes, 1, 1)

    def extract(self, shape: Shape, size: Slice, key: int, *, fold_bn: bool) -> nn.Module:
        """Extract norm and classifier."""
        classifier = self.classifier.extract(shape.channels, self.classifier.out_features)
        return traced(_TokenHead(self.norm.extract(shape.channels), classifier))


class _TokenHead(nn.Module):
    def __init__(self, norm: nn.LayerNorm, classifier: nn.Linear) -> None:
        super().__init__()
        self.norm, self.classifier = norm, classifier

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.classifier(self.norm(x[:, 0])))


def _inner_sizes(size: Slice) -> tuple[int, int, int]:
    assert size.heads is not None
    assert size.head_dim is not None
    assert size.hidden is not None
    return size.heads, size.head_dim, size.hidden


class ViT(Supernet):
    """A DS-ViT++ built from its table.

    Args:
        name: Name of the network and its route space.
        table: The architecture.
        options: Options of the model.
        factory: Device and precision of the parameters.
    """

    drops_everywhere = True

    def __init__(self, name: str, table: ViTTable, options: GateOptions, factory: Factory) -> None:
        super().__init__(
            RouteSpace.of_table(name, table.routes, dict(table.narrowings)),
            slices=(table.routes,),
            gate_widths=[table.stem_width],
            input_spec=table.input_spec,
            options=options,
            factory=factory,
        )
        self.table = table
        (full,) = table.routes[-1]
        self.head = TokenHead(full.width, options.num_classes or table.num_classes, factory)
        width, kernel, stride = table.stem_width, table.stem_kernel, table.stem_stride
        spec = ConvSpec(factory=factory)
        self.stem = ConvNormAct(options.in_channels, width, spec, kernel=kernel, stride=stride)
        self.stem_blocks = nn.ModuleList(SeparableBlock(width, width, spec) for _ in range(2))
        grid = table.input_spec.image_size // table.input_spec.stride
        self.embedding = Embedding(width, full.width, table.patch, grid, factory)
        self.blocks = nn.ModuleList(
            TransformerBlock(full, factory, share=layer / max(full.depth - 1, 1))
            for layer in range(full.depth)
        )
        self.seal()

    def prefix_steps(self) -> list[Step]:
        """Return the convolutional stem."""
        kernel = self.table.stem_kernel
        size = Slice(width=self.table.stem_width, kernel=kernel, padding=kernel // 2)
        steps = [Step(self.stem, size)]
        size = replace(size, kernel=3, padding=1)
        return [*steps, *separable_steps(self.stem_blocks, [size, size])]

    def segment_steps(self, choices: tuple[int, ...]) -> list[Step]:
        """Return the embedding and the blocks that run."""
        (size,) = self.slices(choices)
        blocks = itertools.islice(self.blocks, size.depth)
        return [Step(self.embedding, size), *(Step(cast(Block, block), size) for block in blocks)]


# --- the family ---------------------------------------------------------------------------------------
def _routes(head_dim: int, *rows: tuple[int, int, float, int]) -> tuple[tuple[Slice, ...], ...]:
    """Build the routes from rows of embedding, heads, MLP ratio and depth."""
    return tuple(
        (Slice(width=e, depth=depth, heads=heads, head_dim=head_dim, hidden=int(e * ratio)),)
        for e, heads, ratio, depth in rows
    )


DS_VIT_PLUS = ViTTable(
    input_spec=InputSpec(image_size=224, stride=16),
    num_classes=1000,
    stem_width=24,
    stem_kernel=7,
    stem_stride=2,
    patch=8,
    routes=_routes(
        48,
        (192, 4, 3, 12),
        (224, 5, 3, 12),
        (256, 5, 3.5, 13),
        (288, 6, 3.5, 13),
        (320, 6, 3.5, 13),
        (352, 7, 3.5, 13),
        (384, 7, 4, 14),
        (416, 8, 4, 14),
    ),
    narrowings=(("Ti", (0, 1)), ("S", (2, 3)), ("M", (5, 6)), ("L", (6, 7))),
)

DS_VIT_PLUS_CIFAR = replace(
    DS_VIT_PLUS,
    input_spec=InputSpec(image_size=32, stride=4),
    num_classes=10,
    stem_kernel=3,
    stem_stride=1,
    patch=4,
)

DS_VIT_PLUS_TINY = ViTTable(
    input_spec=InputSpec(image_size=16, stride=4),
    num_classes=10,
    stem_width=8,
    stem_kernel=3,
    stem_stride=1,
    patch=4,
    routes=_routes(16, (32, 2, 2, 2), (48, 3, 2, 2), (64, 4, 3, 3)),
)


@register_supernet(
    "DS-ViT++: 8 routes in embedding, heads, MLP and depth, one gate (paper, Table 6)", GateOptions
)
def ds_vit_plus(options: GateOptions, factory: Factory) -> ViT:
    """DS-ViT++ at 224 × 224."""
    return ViT("ds_vit_plus", DS_VIT_PLUS, options, factory)


@register_supernet("DS-ViT++ for 32 × 32 images", GateOptions)
def ds_vit_plus_cifar(options: GateOptions, factory: Factory) -> ViT:
    """DS-ViT++ at 32 × 32."""
    return ViT("ds_vit_plus_cifar", DS_VIT_PLUS_CIFAR, options, factory)


@register_supernet("DS-ViT++ for 16 × 16 images, 3 routes", GateOptions)
def ds_vit_plus_tiny(options: GateOptions, factory: Factory) -> ViT:
    """A small DS-ViT++ at 16 × 16."""
    return ViT("ds_vit_plus_tiny", DS_VIT_PLUS_TINY, options, factory)
