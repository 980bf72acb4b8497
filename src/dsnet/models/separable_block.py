"""The depthwise separable block of MobileNetV1, with attention between its halves."""

from __future__ import annotations

from torch import nn

from dsnet.models.blocks import ChannelAttention, ConvNormAct, Factory, NormSpec, Step, make_activation
from dsnet.routes import Slice
from dsnet.slicing import SlicedConv2d

__all__ = ["SeparableBlock"]


class SeparableBlock(nn.Module):
    """Depthwise convolution, attention and pointwise convolution, as three blocks."""

    def __init__(
        self,
        width_in: int,
        width: int,
        *,
        kernel: int,
        stride: int,
        keys: tuple[int, int],  # number of norm keys of the depthwise and of the pointwise convolution
        attention: bool,
        norm: NormSpec,
        activation: str,
        factory: Factory,
    ) -> None:
        super().__init__()
        depthwise = SlicedConv2d(width_in, width_in, kernel=kernel, stride=stride, groups=width_in, **factory)
        self.depthwise = ConvNormAct(
            depthwise, norm.make(width_in, keys[0], factory), make_activation(activation), filters="input"
        )
        self.attention = ChannelAttention(width_in, factory) if attention else None
        pointwise = SlicedConv2d(width_in, width, kernel=1, **factory)
        self.pointwise = ConvNormAct(
            pointwise, norm.make(width, keys[1], factory), make_activation(activation)
        )

    def spatial_steps(self, size: Slice, key: int) -> list[Step]:
        """Return the steps of the depthwise convolution and the attention."""
        steps = [Step(self.depthwise, size, key)]
        if self.attention is not None:
            steps.append(Step(self.attention, size, key))
        return steps

    def pointwise_step(self, size: Slice, key: int) -> Step:
        """Return the step of the pointwise convolution."""
        return Step(self.pointwise, size, key)

    def steps(self, size: Slice, key: int) -> list[Step]:
        """Return all steps."""
        return [*self.spatial_steps(size, key), self.pointwise_step(size, key)]
