"""Decisions of a gate, images sorted by them, and where programs find theirs: as kernels on a GPU.

Torch does each in a dozen small ones, and the host waits for them at every gate.
"""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803
from typing import NamedTuple

import torch
from torch import Tensor

from dsnet.kernels import elementwise as scaling

try:
    import triton
    import triton.language as tl

    from dsnet.kernels.decide import outdoes
except ImportError:  # there is no Triton for macOS and Windows
    triton = None

__all__ = ["Found", "find", "put_away", "settle"]

MOST = 4096  # images that a program can sort


def settle(
    taken: Tensor,  # [images]
    order: Tensor,  # [images]
    counts: Tensor,  # [pairs]
    starts: Tensor,  # [pairs]
    images: int,
    valid: Tensor,  # [1]: how many of them there are
    *,
    scores: Tensor | None = None,  # [images, choices]: to decide by; none: it is decided
    prices: Tensor | None = None,  # [before, choices], float64
    places: Tensor | None = None,  # [choices], of scores among all that is held
    previous: Tensor | None = None,  # [images]: choices before, where prices depend on them
    held: int = 0,  # choices of a pair with ``previous``; 0: images are sorted by their own choice alone
) -> None:
    """Takes the best score less its price, the first of equals, and sorts images by what they take.

    Writes who takes what, and of every pair how many images take it and where they begin in the order.
    """
    pairs = len(counts)
    if images <= MOST and scaling.has_kernels(taken):
        block = 1 << (images - 1).bit_length()
        nothing = taken
        with torch.cuda.device_of(taken):
            _settle[(1,)](
                nothing if scores is None else scores, nothing if prices is None else prices,
                nothing if places is None else places, nothing if previous is None else previous,
                valid, taken, order, counts, starts, images, 0 if scores is None else scores.stride(0),
                0 if scores is None else scores.shape[1], previous is not None, held, pairs, block,
                num_warps=max(1, min(8, block // 32)),
            )  # fmt: skip
        return
    if scores is not None:
        own = prices if previous is None else prices[previous[:images]]
        best = (scores[:images].double() - own).argmax(1)
        taken[:images].copy_(places[best])
    pair = taken[:images] if not held else previous[:images] * held + taken[:images]
    pair = torch.where(torch.arange(images, device=taken.device) < valid, pair, pairs)
    order[:images].copy_(pair.argsort(stable=True))
    found = (pair[:, None] == torch.arange(pairs, device=taken.device)).sum(0)
    counts.copy_(found)
    starts.copy_(found.cumsum(0) - found)


class Found(NamedTuple):
    """The images of a program: their rows, the rows that they are written to, and what came before."""

    at: Tensor  # [size]
    to: Tensor  # [size]; of those that there are not, one that nobody reads
    earlier: Tensor  # [size]


def find(
    order: Tensor, counts: Tensor, starts: Tensor, earlier: Tensor, pair: int, rows: Tensor, most: int
) -> Found:
    """Those of a pair, as many as there are ``rows`` [size]; in row ``most`` nobody reads."""
    if scaling.has_kernels(order):
        size = len(rows)
        at, to, before = (torch.empty_like(rows) for _ in range(3))
        with torch.cuda.device_of(order):
            _find[(-(-size // 128),)](
                order, counts, starts, earlier, at, to, before, pair, size, most, 128, num_warps=4
            )
        return Found(at, to, before)
    at = order[(starts[pair] + rows).clamp_(max=most - 1)]
    return Found(at, torch.where(rows < counts[pair], at, most), earlier.index_select(0, at))


def put_away(
    to: Tensor, found: Tensor, scores: Tensor, before: Tensor, earlier: Tensor, width: int, place: int
) -> None:
    """Scores [size, choices] into their rows; and what came before, with the ``place`` among ``width``."""
    if scaling.has_kernels(scores):
        size, choices = found.shape
        with torch.cuda.device_of(scores):
            _put_away[(-(-size // 128),)](
                to, found, scores, before, earlier, size, found.stride(0), found.stride(1), scores.stride(0),
                width, place, choices, 128, num_warps=4,
            )  # fmt: skip
        return
    scores.index_copy_(0, to, found)
    earlier.index_copy_(0, to, before * width + place)


if triton is not None:

    @triton.jit
    def _settle(
        scores,  # [images, choices]
        prices,  # [before, choices]
        places,  # [choices]
        previous,  # [images]
        valid,  # [1]
        taken,  # [images]
        order,  # [images]
        counts,  # [pairs]
        starts,  # [pairs]
        images,
        row,
        CHOICES: tl.constexpr,  # 0: it is decided
        BEFORE: tl.constexpr,
        HELD: tl.constexpr,
        PAIRS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        image = tl.arange(0, BLOCK)
        there = image < images
        before = tl.zeros((BLOCK,), tl.int64)
        if BEFORE:
            before = tl.load(previous + image, mask=there, other=0)
        if CHOICES > 0:
            best = tl.load(scores + image * row, mask=there, other=0.0).to(tl.float64)
            best -= tl.load(prices + before * CHOICES, mask=there, other=0.0)
            found = tl.zeros((BLOCK,), tl.int64) + tl.load(places)
            for choice in range(1, CHOICES):
                score = tl.load(scores + image * row + choice, mask=there, other=0.0).to(tl.float64)
                score -= tl.load(prices + before * CHOICES + choice, mask=there, other=0.0)
                better = outdoes(score, best)
                found = tl.where(better, tl.load(places + choice), found)
                best = tl.where(better, score, best)
            tl.store(taken + image, found, mask=there)
        else:
            found = tl.load(taken + image, mask=there, other=0)
        pair = found
        if HELD > 0:
            pair += before * HELD
        pair = tl.where(image < tl.load(valid), pair, PAIRS)
        start = tl.sum(tl.zeros((BLOCK,), tl.int32), 0)
        for number in range(PAIRS + 1):
            own = (there & (pair == number)).to(tl.int32)
            tl.store(order + start + tl.cumsum(own, 0) - 1, image.to(tl.int64), mask=own > 0)
            count = tl.sum(own, 0)
            if number < PAIRS:
                tl.store(counts + number, count.to(tl.int64))
                tl.store(starts + number, start.to(tl.int64))
            start += count

    @triton.jit
    def _find(
        order, counts, starts, earlier, at, to, before, pair, size, most, BLOCK: tl.constexpr
    ):  # fmt: skip
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = row < size
        image = tl.load(order + tl.minimum(tl.load(starts + pair) + row, most - 1), mask=inside, other=0)
        tl.store(at + row, image, mask=inside)
        tl.store(to + row, tl.where(row < tl.load(counts + pair), image, most), mask=inside)
        tl.store(before + row, tl.load(earlier + image, mask=inside, other=0), mask=inside)

    @triton.jit
    def _put_away(
        to,  # [size]
        found,  # [size, choices]
        scores,  # [images + 1, choices]
        before,  # [size]
        earlier,  # [images + 1]
        size,
        by_image,
        by_choice,
        row,
        width,
        place,
        CHOICES: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = number < size
        image = tl.load(to + number, mask=inside, other=0)
        for choice in range(CHOICES):
            score = tl.load(found + number * by_image + choice * by_choice, mask=inside, other=0.0)
            tl.store(scores + image * row + choice, score, mask=inside)
        tl.store(earlier + image, tl.load(before + number, mask=inside, other=0) * width + place, mask=inside)
