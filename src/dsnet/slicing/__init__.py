"""Layers that run with a slice of their weights: pure functions, and thin modules on top of them."""

from dsnet.slicing.attention import SlicedAttention
from dsnet.slicing.batch_norm import KeyState, SplitBatchNorm2d
from dsnet.slicing.conv import SlicedConv2d
from dsnet.slicing.linear import SlicedLinear
from dsnet.slicing.mlp import SlicedMLP
from dsnet.slicing.mode import ImageStatistics, Mode, Statistics, batch_statistics
from dsnet.slicing.norm import SlicedGroupNorm, SlicedLayerNorm
from dsnet.slicing.parameters import Factory
from dsnet.slicing.patch_embed import SlicedPatchEmbed

__all__ = [
    "Factory",
    "ImageStatistics",
    "KeyState",
    "Mode",
    "SlicedAttention",
    "SlicedConv2d",
    "SlicedGroupNorm",
    "SlicedLayerNorm",
    "SlicedLinear",
    "SlicedMLP",
    "SlicedPatchEmbed",
    "SplitBatchNorm2d",
    "Statistics",
    "batch_statistics",
]
