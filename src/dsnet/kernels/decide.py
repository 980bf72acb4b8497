"""What a gate takes for every image, and images in order of it, as kernels."""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, N803
import triton
import triton.language as tl


@triton.jit
def admit(valid, which, images, BLOCK: tl.constexpr):
    """Of so many images there are ``valid`` [1]: the only route is theirs."""
    image = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = image < tl.load(valid)
    tl.store(which + image, tl.where(there, 0, -1), mask=image < images)


@triton.jit
def outdoes(score, best):
    """Whether it is better, as torch's argmax sees it: what is not a number is best of all."""
    return (score > best) | ((score != score) & (best == best))


@triton.jit
def decide(
    scores,  # [images, choices]
    prices,  # [choices], float64
    places,  # [choices]: of what they are scores for, among all that is held
    taken,  # [images]: by place among all that is held
    images,
    row,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best score less its price, the first of equals."""
    image = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = image < images
    best = tl.load(scores + image * row, mask=there, other=0.0).to(tl.float64) - tl.load(prices)
    found = tl.full((BLOCK,), 0, tl.int64) + tl.load(places)
    for choice in range(1, CHOICES):
        score = tl.load(scores + image * row + choice, mask=there, other=0.0).to(tl.float64)
        score -= tl.load(prices + choice)
        better = outdoes(score, best)
        found = tl.where(better, tl.load(places + choice), found)
        best = tl.where(better, score, best)
    tl.store(taken + image, found, mask=there)


@triton.jit
def arrange(
    taken,  # [images]: by place among all that is held
    asked,  # [images]: whether it is to be run
    valid,  # [1]: how many images there are
    route_of,  # by place: a route, a negative one: it is not there
    which,  # [images]: routes
    order,  # [tiles, BI]: images of one route each, a negative one: none
    routes,  # [tiles], a negative one: none
    images,
    ASKED: tl.constexpr,
    ROUTES: tl.constexpr,
    BI: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    MOST: tl.constexpr,  # tiles that there is room for
):
    """Images by route, in tiles of one route each; one program."""
    image = tl.arange(0, BLOCK)
    there = image < tl.minimum(tl.load(valid), images)
    route = tl.load(route_of + tl.load(taken + image, mask=there, other=0), mask=there, other=-1)
    if ASKED:
        route = tl.where(tl.load(asked + image, mask=there, other=0) != 0, route, -1)
    tl.store(which + image, route, mask=image < images)
    tile = tl.arange(0, TILES)
    for column in range(BI):
        tl.store(order + tile * BI + column, tl.full((TILES,), -1, tl.int32), mask=tile < MOST)
    tl.debug_barrier()  # other threads write to the same places
    of_tile = tl.full((TILES,), -1, tl.int32)
    first = 0
    for number in range(ROUTES):
        own = (route == number).to(tl.int32)
        place = tl.cumsum(own, 0) - 1
        tl.store(order + first * BI + place, image, mask=own > 0)
        needed = (tl.sum(own, 0) + BI - 1) // BI
        of_tile = tl.where((tile >= first) & (tile < first + needed), number, of_tile)
        first += needed
    tl.store(routes + tile, of_tile, mask=tile < MOST)
