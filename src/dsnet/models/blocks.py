"""The interface of the blocks that supernets are built of, and regularisation.

A block runs with the sizes of a `Slice` and the norm key that its input belongs to. The methods `forward`,
`cost` and `extract` stand side by side, so that they stay consistent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dsnet.counts import Cost, Shape
from dsnet.routes import Slice
from dsnet.slicing import Mode

__all__ = ["Block", "Step", "count_steps", "drop_branch", "drop_features", "extract_steps", "run_steps"]


class Block(nn.Module, ABC):
    """Base class of blocks. A block holds weights only; sizes are arguments.

    A block of a new kind defines `forward`, `cost` and `extract`. CONTRIBUTING has an example.

    Attributes:
        stride: Factor by which the resolution shrinks.
        makes_tokens: Whether the block turns maps [B, C, H, W] into tokens [B, N, E].
    """

    stride = 1
    makes_tokens = False

    @abstractmethod
    def forward(self, x: Tensor, size: Slice, key: int = 0, mode: Mode | None = None) -> Tensor:
        """Run at a size.

        Args:
            x: Features, [B, C, H, W] or [B, N, E]; their channels are the slice of the input side.
            size: Sizes of the block's stage.
            key: Norm key of the input.
            mode: How the pass runs.

        Returns:
            Features, [B, C', H', W'] or [B, N, E].
        """

    @abstractmethod
    def cost(self, shape: Shape, size: Slice) -> tuple[Cost, Shape]:
        """Count the block for one image.

        Args:
            shape: Shape of the input.
            size: Sizes of the block's stage.

        Returns:
            The cost, and the shape of the output.
        """

    @abstractmethod
    def extract(self, shape: Shape, size: Slice, key: int, *, fold_bn: bool) -> nn.Module:
        """Build the stand-alone block of one size from torch's own layers.

        Args:
            shape: Shape of the input.
            size: Sizes of the block's stage.
            key: Norm key of the input.
            fold_bn: Fold batch norms into the convolutions before them.

        Returns:
            A module that computes the same from one tensor.
        """


class Step(NamedTuple):
    """A block with the arguments that it needs to run on one route."""

    block: Block
    size: Slice
    key: int = 0  # of the block's norms


def run_steps(steps: Iterable[Step], x: Tensor, mode: Mode | None = None) -> Tensor:
    """Run blocks one after the other."""
    for block, size, key in steps:
        x = block(x, size, key, mode)
    return x


def count_steps(steps: Iterable[Step], shape: Shape) -> tuple[Cost, Shape]:
    """Count blocks that run one after the other; return the cost and the shape of the output."""
    total = Cost()
    for block, size, _ in steps:
        cost, shape = block.cost(shape, size)
        total += cost
    return total, shape


def extract_steps(
    steps: Iterable[Step], shape: Shape, *, fold_bn: bool
) -> tuple[dict[Block, nn.Module], Shape]:
    """Extract blocks that run one after the other; return them by block, and the shape of the output."""
    modules: dict[Block, nn.Module] = {}
    for block, size, key in steps:
        modules[block] = block.extract(shape, size, key, fold_bn=fold_bn)
        _, shape = block.cost(shape, size)
    return modules, shape


# --- regularisation -------------------------------------------------------------------------------------
def drop_branch(branch: Tensor, mode: Mode | None, share: float) -> Tensor:
    """Apply stochastic depth: drop a residual branch [B, …] for some images, and scale it for the others.

    Args:
        branch: Output of the branch.
        mode: How the pass runs; None drops nothing.
        share: Factor of the mode's rate, which grows from 0 in the first block to 1 in the last.

    Examples:
        >>> mode = Mode(drop_path=0.5, generator=torch.Generator().manual_seed(0))
        >>> drop_branch(torch.ones(4, 2), mode, share=1.0)[:, 0].tolist()
        [0.0, 2.0, 0.0, 0.0]
    """
    if mode is None or mode.drop_path * share == 0:
        return branch
    shape = (len(branch), *(1,) * (branch.ndim - 1))
    return branch * _dropout_mask(shape, branch, mode, mode.drop_path * share)


def drop_features(x: Tensor, mode: Mode | None) -> Tensor:
    """Apply dropout to the input [B, C] of a classifier, at the rate of the mode."""
    return x if mode is None or mode.dropout == 0 else x * _dropout_mask(x.shape, x, mode, mode.dropout)


def _dropout_mask(shape: tuple[int, ...], like: Tensor, mode: Mode, rate: float) -> Tensor:
    draws = torch.rand(shape, device=like.device, generator=mode.generator)
    return (draws >= rate).to(like.dtype) / (1 - rate)
