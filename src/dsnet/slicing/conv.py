"""2-D convolution, sliced in filters, input channels, groups, kernel, dilation and padding."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from dsnet.counts import Cost, Shape
from dsnet.errors import DsnetError
from dsnet.slicing import functional as SF
from dsnet.slicing.parameters import Factory, draw_normal, new_parameter
from dsnet.slicing.static import with_copies

__all__ = ["SlicedConv2d"]


class SlicedConv2d(nn.Module):
    """Square convolution that runs with a slice of its weight.

    With several groups it is sliced by the number of groups, so that the output width follows from the input;
    with ``per_group`` it is sliced by the filters of each group. A depthwise convolution has
    ``groups == in_channels``.

    Args:
        in_channels: Input channels at full size.
        out_channels: Filters at full size.
        kernel: Side of the kernel at full size.
        stride: Stride.
        groups: Number of groups at full size.
        per_group: Slice the filters of each group rather than the number of groups.
        bias: Whether to add a bias.
        **factory: ``device`` and ``dtype``.

    Raises:
        DsnetError: The channels cannot be shared by the groups.

    Examples:
        >>> layer = SlicedConv2d(8, 16, kernel=5)
        >>> layer(torch.zeros(1, 4, 9, 9), out=6, kernel=3, padding=1).shape
        torch.Size([1, 6, 9, 9])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel: int,
        stride: int = 1,
        groups: int = 1,
        per_group: bool = False,
        bias: bool = False,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        if in_channels % groups or out_channels % groups:
            raise DsnetError(f"{in_channels} → {out_channels} channels cannot be shared by {groups} groups")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel, self.stride, self.groups, self.per_group = kernel, stride, groups, per_group
        self.weight = new_parameter(out_channels, in_channels // groups, kernel, kernel, **factory)
        self.bias = new_parameter(out_channels, **factory) if bias else None
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialise by He's rule with the fan-out of a group; the bias is zero."""
        fan_out = self.kernel**2 * self.out_channels / self.groups
        draw_normal(self.weight, (2 / fan_out) ** 0.5, generator)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor,
        out: int | None = None,
        *,
        kernel: int | None = None,
        padding: int | None = None,
        dilation: int = 1,
    ) -> Tensor:
        """Convolve with a slice of the weight; see `dsnet.slicing.functional.conv2d`.

        Args:
            x: Features [B, C, H, W]; C is the slice of the input channels.
            out: Number of filters (default: all, or with groups as many as follow from the input).
            kernel: Side of the centred window of the kernel (default: the full kernel).
            padding: Padding (default: half the kernel).
            dilation: Keep every ``dilation``-th tap of the window.

        Returns:
            Features [B, out, H', W'].

        Raises:
            DsnetError: The weight has no such slice.
        """
        return SF.conv2d(
            x,
            self.weight,
            self.bias,
            out=out,
            kernel=kernel,
            stride=self.stride,
            padding=self.padding(kernel, padding),
            dilation=dilation,
            groups=self.groups,
            per_group=self.per_group,
        )

    def padding(self, kernel: int | None, padding: int | None) -> int:
        """Return ``padding``, or by default half the kernel, with which odd kernels keep the resolution."""
        return (self.kernel if kernel is None else kernel) // 2 if padding is None else padding

    def cost(
        self,
        shape: Shape,
        out: int | None = None,
        *,
        kernel: int | None = None,
        padding: int | None = None,
        dilation: int = 1,
    ) -> tuple[Cost, Shape]:
        """Count the layer at this size on an input of this shape; return also the shape of the output."""
        filters, group_in = self.weight.shape[:2]
        out, group_in, _ = SF.filter_sizes(
            filters, group_in, shape.channels, out, groups=self.groups, per_group=self.per_group
        )
        taps = SF.window_taps(self.kernel, kernel, dilation)
        side = len(range(*taps.indices(self.kernel)))
        weights = out * group_in * side * side
        extent, pad = taps.stop - taps.start, self.padding(kernel, padding)
        after = SF.conv_output_shape(shape, out, extent, self.stride, pad)
        params = weights + (0 if self.bias is None else out)
        return Cost(params=params, layers=weights * after.area), after

    def extract(
        self,
        in_channels: int,
        out: int | None = None,
        *,
        kernel: int | None = None,
        padding: int | None = None,
        dilation: int = 1,
    ) -> nn.Conv2d:
        """Extract the stand-alone layer of this size."""
        weight, bias, groups = SF.slice_filters(
            self.weight, self.bias, in_channels, out, groups=self.groups, per_group=self.per_group
        )
        window, pad = SF.slice_window(weight, kernel, dilation), self.padding(kernel, padding)
        sizes = (in_channels, len(window), window.shape[-1], self.stride, pad, dilation, groups)
        return with_copies(nn.Conv2d(*sizes, bias=bias is not None, device="meta"), window, bias)

    def extra_repr(self) -> str:
        """Return the sizes for printing."""
        text = f"{self.in_channels}, {self.out_channels}, kernel={self.kernel}, stride={self.stride}"
        return text + (f", groups={self.groups}" if self.groups > 1 else "")
