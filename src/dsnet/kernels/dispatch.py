"""Decisions of a gate, and the sorting of images by them.

Torch needs a dozen small kernels for each of these steps. Functions marked with "Triton only" have no
fallback to torch operations.
"""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803
from typing import NamedTuple

import torch
from torch import Tensor

from dsnet.kernels.launch import AVAILABLE, has_kernels, on_device_of, power_of_two

if AVAILABLE:
    import triton
    import triton.language as tl

__all__ = [
    "TILE",
    "GroupRows",
    "choose",
    "first_images",
    "gather_indices",
    "scatter_scores",
    "sort_by_choice",
    "tile_by_route",
]

MAX_SORTED = 4096  # images that one program sorts
TILE = 16  # images of one route that a linear layer processes together


def sort_by_choice(
    chosen: Tensor,
    order: Tensor,
    counts: Tensor,
    starts: Tensor,
    images: int,
    valid: Tensor,
    *,
    scores: Tensor | None = None,
    penalties: Tensor | None = None,
    choice_index: Tensor | None = None,
    previous: Tensor | None = None,
    paired_choices: int = 0,
) -> None:
    """Choose the best score less its penalty, the first of equals, and sort images by their choice.

    Choices are given by their index among all choices of the plan. A group is the images of one choice or,
    with ``paired_choices``, of one choice and one choice at the gate before.

    Args:
        chosen: The choice [images] of each image: written, or read where there are no ``scores``.
        order: Output, image numbers [images] sorted by group.
        counts: Output, the number of images in each group [groups].
        starts: Output, the position in ``order`` of each group's first image [groups].
        images: How many images to sort.
        valid: How many of these are images and not padding [1].
        scores: Scores [images, columns].
        penalties: What to subtract from scores, float64 [previous choices, columns].
        choice_index: The choice of each column [columns].
        previous: The choice [images] at the gate before, for penalties and groups that depend on it.
        paired_choices: How many choices there are for each choice at the gate before, if groups are pairs.
    """
    groups = len(counts)
    if images <= MAX_SORTED and has_kernels(chosen):
        block = power_of_two(images)
        unused = chosen
        with on_device_of(chosen):
            _sort_by_choice[(1,)](
                unused if scores is None else scores, unused if penalties is None else penalties,
                unused if choice_index is None else choice_index, unused if previous is None else previous,
                valid, chosen, order, counts, starts, images, 0 if scores is None else scores.stride(0),
                0 if scores is None else scores.shape[1], previous is not None, paired_choices, groups, block,
                num_warps=max(1, min(8, block // 32)),
            )  # fmt: skip
        return
    if scores is not None:
        penalty = penalties if previous is None else penalties[previous[:images]]
        best = (scores[:images].double() - penalty).argmax(1)
        chosen[:images].copy_(choice_index[best])
    group = chosen[:images] if not paired_choices else previous[:images] * paired_choices + chosen[:images]
    group = torch.where(torch.arange(images, device=chosen.device) < valid, group, groups)
    order[:images].copy_(group.argsort(stable=True))
    sizes = (group[:, None] == torch.arange(groups, device=chosen.device)).sum(0)
    counts.copy_(sizes)
    starts.copy_(sizes.cumsum(0) - sizes)


class GroupRows(NamedTuple):
    """The images of a group: the rows to read and to write, and their routing history. All [size]."""

    source: Tensor
    target: Tensor  # for padding, a row that is never read
    history: Tensor


def gather_indices(
    order: Tensor,
    counts: Tensor,
    starts: Tensor,
    history: Tensor,
    group: int,
    positions: Tensor,
    max_images: int,
) -> GroupRows:
    """Return the rows of a group's images, padded to the number of ``positions``, 0, 1, … [size].

    Args:
        order: See `sort_by_choice`.
        counts: See `sort_by_choice`.
        starts: See `sort_by_choice`.
        history: The routing history of each image [max_images + 1].
        group: The group's index.
        positions: 0, 1, … [size].
        max_images: The target row for padding, which is never read.
    """
    if has_kernels(order):
        size = len(positions)
        source, target, earlier = (torch.empty_like(positions) for _ in range(3))
        with on_device_of(order):
            _gather_indices[(-(-size // 128),)](
                order, counts, starts, history, source, target, earlier, group, size, max_images, 128,
                num_warps=4,
            )  # fmt: skip
        return GroupRows(source, target, earlier)
    source = order[(starts[group] + positions).clamp_(max=max_images - 1)]
    target = torch.where(positions < counts[group], source, max_images)
    return GroupRows(source, target, history.index_select(0, source))


def scatter_scores(
    index: Tensor, scores: Tensor, table: Tensor, earlier: Tensor, history: Tensor, width: int, choice: int
) -> None:
    """Write scores and routing histories into the rows of their images.

    Args:
        index: The row of each image [n].
        scores: Scores [n, columns].
        table: Output, scores [rows, columns].
        earlier: The routing history of each image before this choice [n].
        history: Output, the histories with this choice [rows]: ``earlier * width + choice``.
        width: How many choices there are at this gate.
        choice: The choice of these images.
    """
    if has_kernels(table):
        size, columns = scores.shape
        with on_device_of(table):
            _scatter_scores[(-(-size // 128),)](
                index, scores, table, earlier, history, size, scores.stride(0), scores.stride(1),
                table.stride(0), width, choice, columns, 128, num_warps=4,
            )  # fmt: skip
        return
    table.index_copy_(0, index, scores)
    history.index_copy_(0, index, earlier * width + choice)


def choose(scores: Tensor, penalties: Tensor, choice_index: Tensor, chosen: Tensor) -> None:
    """Write the choice with the best score less its penalty into ``chosen`` [images]. Triton only.

    Args:
        scores: Scores [images, columns].
        penalties: What to subtract from scores, float64 [1, columns].
        choice_index: The choice of each column [columns].
        chosen: Output [images].
    """
    images, columns = scores.shape
    with on_device_of(scores):
        _choose[(-(-images // 128),)](
            scores, penalties, choice_index, chosen, images, scores.stride(0), columns, 128
        )


def first_images(images: int, valid: Tensor) -> Tensor:
    """Return routes [images]: 0 for the first ``valid`` [1] images, -1 for the padding. Triton only."""
    routes = torch.empty(images, dtype=torch.int32, device=valid.device)
    with on_device_of(valid):
        _first_images[(-(-images // 128),)](valid, routes, images, 128)
    return routes


def tile_by_route(
    chosen: Tensor, valid: Tensor, route_of: Tensor, count: int, active: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort images into tiles of `TILE` images of one route each. Triton only.

    Args:
        chosen: The choice of each image [images].
        valid: How many of these are images and not padding [1].
        route_of: The route of each choice; -1 for a choice without one.
        count: How many routes there are.
        active: Which images to run [images] (default: all).

    Returns:
        The route of each image, -1 for one that is not run [images]; the image numbers of each tile, padded
        with -1 [tiles, TILE]; the route of each tile, -1 for an empty one [tiles].
    """
    images, device = len(chosen), chosen.device
    max_tiles = -(-images // TILE) + count
    routes = torch.empty(images, dtype=torch.int32, device=device)
    order = torch.empty(max_tiles, TILE, dtype=torch.int32, device=device)
    tile_routes = torch.empty(max_tiles, dtype=torch.int32, device=device)
    block = power_of_two(images)
    with on_device_of(chosen):
        _tile_by_route[(1,)](
            chosen, chosen if active is None else active, valid, route_of, routes, order, tile_routes,
            images, active is not None, count, TILE, block, power_of_two(max_tiles), max_tiles,
            num_warps=8 if block >= 1024 else 4,
        )  # fmt: skip
    return routes, order, tile_routes


if AVAILABLE:

    @triton.jit
    def _better(score, best):
        """Compare as torch's argmax does: NaN is the largest value."""
        return (score > best) | ((score != score) & (best == best))

    @triton.jit
    def _best_choice(scores, penalties, choice_index, mask, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
        """Return the best choice [BLOCK]; scores and penalties point to each image's first column."""
        best = tl.load(scores, mask=mask, other=0.0).to(tl.float64)
        best -= tl.load(penalties, mask=mask, other=0.0)
        chosen = tl.zeros((BLOCK,), tl.int64) + tl.load(choice_index)
        for column in range(1, COLUMNS):
            score = tl.load(scores + column, mask=mask, other=0.0).to(tl.float64)
            score -= tl.load(penalties + column, mask=mask, other=0.0)
            better = _better(score, best)
            chosen = tl.where(better, tl.load(choice_index + column), chosen)
            best = tl.where(better, score, best)
        return chosen

    @triton.jit
    def _sort_by_choice(
        scores,  # [images, columns]
        penalties,  # [previous choices, columns]
        choice_index,  # [columns]
        previous,  # [images]
        valid,  # [1]
        chosen,  # [images]
        order,  # [images]
        counts,  # [groups]
        starts,  # [groups]
        images,
        row,
        COLUMNS: tl.constexpr,  # 0: images have chosen
        HAS_PREVIOUS: tl.constexpr,
        PAIRED: tl.constexpr,
        GROUPS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        image = tl.arange(0, BLOCK)
        mask = image < images
        before = tl.zeros((BLOCK,), tl.int64)
        if HAS_PREVIOUS:
            before = tl.load(previous + image, mask=mask, other=0)
        if COLUMNS > 0:
            choice = _best_choice(
                scores + image * row, penalties + before * COLUMNS, choice_index, mask, COLUMNS, BLOCK
            )
            tl.store(chosen + image, choice, mask=mask)
        else:
            choice = tl.load(chosen + image, mask=mask, other=0)
        group = choice
        if PAIRED > 0:
            group += before * PAIRED
        group = tl.where(image < tl.load(valid), group, GROUPS)
        start = tl.sum(tl.zeros((BLOCK,), tl.int32), 0)
        for number in range(GROUPS + 1):
            member = (mask & (group == number)).to(tl.int32)
            tl.store(order + start + tl.cumsum(member, 0) - 1, image.to(tl.int64), mask=member > 0)
            count = tl.sum(member, 0)
            if number < GROUPS:
                tl.store(counts + number, count.to(tl.int64))
                tl.store(starts + number, start.to(tl.int64))
            start += count

    @triton.jit
    def _gather_indices(
        order, counts, starts, history, source, target, earlier, group, size, max_images, BLOCK: tl.constexpr
    ):  # fmt: skip
        position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = position < size
        offset = tl.minimum(tl.load(starts + group) + position, max_images - 1)
        image = tl.load(order + offset, mask=mask, other=0)
        tl.store(source + position, image, mask=mask)
        row = tl.where(position < tl.load(counts + group), image, max_images)
        tl.store(target + position, row, mask=mask)
        tl.store(earlier + position, tl.load(history + image, mask=mask, other=0), mask=mask)

    @triton.jit
    def _scatter_scores(
        index,  # [size]
        scores,  # [size, columns]
        table,  # [images + 1, columns]
        earlier,  # [size]
        history,  # [images + 1]
        size,
        by_image,
        by_column,
        row,
        width,
        choice,
        COLUMNS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = number < size
        image = tl.load(index + number, mask=mask, other=0)
        for column in range(COLUMNS):
            score = tl.load(scores + number * by_image + column * by_column, mask=mask, other=0.0)
            tl.store(table + image * row + column, score, mask=mask)
        before = tl.load(earlier + number, mask=mask, other=0)
        tl.store(history + image, before * width + choice, mask=mask)

    @triton.jit
    def _first_images(valid, routes, images, BLOCK: tl.constexpr):
        image = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        real = image < tl.load(valid)
        tl.store(routes + image, tl.where(real, 0, -1), mask=image < images)

    @triton.jit
    def _choose(
        scores,  # [images, columns]
        penalties,  # [columns], float64
        choice_index,  # [columns]
        chosen,  # [images]
        images,
        row,
        COLUMNS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        image = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = image < images
        penalties += tl.zeros((BLOCK,), tl.int64)
        choice = _best_choice(scores + image * row, penalties, choice_index, mask, COLUMNS, BLOCK)
        tl.store(chosen + image, choice, mask=mask)

    @triton.jit
    def _tile_by_route(
        chosen,  # [images]
        active,  # [images]
        valid,  # [1]
        route_of,  # [choices]
        routes,  # [images]
        order,  # [tiles, TILE]
        tile_routes,  # [tiles]
        images,
        ACTIVE: tl.constexpr,
        ROUTES: tl.constexpr,
        TILE: tl.constexpr,
        BLOCK: tl.constexpr,
        TILES: tl.constexpr,
        MAX_TILES: tl.constexpr,
    ):
        """Sort all images in one program."""
        image = tl.arange(0, BLOCK)
        mask = image < tl.minimum(tl.load(valid), images)
        route = tl.load(route_of + tl.load(chosen + image, mask=mask, other=0), mask=mask, other=-1)
        if ACTIVE:
            route = tl.where(tl.load(active + image, mask=mask, other=0) != 0, route, -1)
        tl.store(routes + image, route, mask=image < images)
        tile = tl.arange(0, TILES)
        for column in range(TILE):
            tl.store(order + tile * TILE + column, tl.full((TILES,), -1, tl.int32), mask=tile < MAX_TILES)
        tl.debug_barrier()  # other threads write to the same addresses
        route_of_tile = tl.full((TILES,), -1, tl.int32)
        first = 0
        for number in range(ROUTES):
            member = (route == number).to(tl.int32)
            position = tl.cumsum(member, 0) - 1
            tl.store(order + first * TILE + position, image, mask=member > 0)
            needed = (tl.sum(member, 0) + TILE - 1) // TILE
            route_of_tile = tl.where((tile >= first) & (tile < first + needed), number, route_of_tile)
            first += needed
        tl.store(tile_routes + tile, route_of_tile, mask=tile < MAX_TILES)
