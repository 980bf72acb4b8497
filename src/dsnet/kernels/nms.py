"""Boxes of answers on a GPU by four kernels, without a look from the host.

`dsnet.detection.postprocess.best_boxes` says what they do. Of equal scores the lower prior, then the lower
class is the better one.
"""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803
import torch
from torch import Tensor

from dsnet.errors import DsnetError

try:
    import triton
    import triton.language as tl
except ImportError:  # there is none for macOS and Windows
    triton = None

__all__ = ["AVAILABLE", "PRIORS", "boxes_by_kernels"]

AVAILABLE = triton is not None
PRIORS = 1 << 15  # at most: a program holds the scores of all of them


def boxes_by_kernels(
    offsets: Tensor,
    logits: Tensor,
    priors: Tensor,
    *,
    score: float,
    overlap: float,
    most: int,
    candidates: int,
    variances: tuple[float, float],
) -> Tensor:
    """Boxes of every image, best first [B, n, 6]: corners, score, class; a score of -1: there is none.

    Of every image and class ``candidates`` are compared with each other. n is ``most``, or how many there can
    be. Answers need not be contiguous; there is at least one of each of their dimensions.
    """
    images, count, kinds = logits.shape[0], logits.shape[1], logits.shape[2] - 1
    if offsets.shape != (images, count, 4) or priors.shape != (count, 4) or count > PRIORS:
        raise DsnetError(
            f"no boxes of offsets {list(offsets.shape)} and logits {list(logits.shape)} with priors "
            f"{list(priors.shape)}: all need the same number of priors, no more than {PRIORS}"
        )
    few, padded = min(candidates, count), -(-count // 16) * 16  # rows that begin where a wide load can
    rows, most = images * kinds, min(most, kinds * few)
    keys = torch.empty(rows, padded, dtype=torch.int32, device=logits.device)
    chosen = torch.empty(rows, few, dtype=torch.int64, device=logits.device)
    kept = torch.empty(rows, few, 5, dtype=torch.float32, device=logits.device)
    found = torch.empty(images, most, 6, dtype=torch.float32, device=logits.device)
    across, along, block = _power(1 + kinds), _power(padded), _power(few)
    step, whole = max(1, 2048 // across), max(32, block)
    boxes = torch.empty(rows, whole, 5, dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):  # kernels are launched on the current device
        _likely[(images, -(-padded // step))](
            logits, keys, float(score), count, padded, kinds, *logits.stride(), step, across, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
        _chosen[(rows,)](
            keys, chosen, padded, few, block, along, num_warps=max(1, along // 1024),
            enable_fp_fusion=False,
        )  # fmt: skip
        _kept[(rows,)](
            chosen, offsets, priors, boxes, kept, found, kinds, most, float(overlap), *offsets.stride(),
            *priors.stride(), *variances, few, whole, num_warps=min(8, whole // 32), enable_fp_fusion=False,
        )  # fmt: skip
        _merged[(rows,)](
            kept, found, most, kinds, few, block, block.bit_length(), num_warps=max(1, block // 64),
            enable_fp_fusion=False,
        )  # fmt: skip
    return found


def _power(count: int) -> int:
    """Of two, and no less."""
    return 1 << (count - 1).bit_length()


if AVAILABLE:
    EVERY = tl.constexpr(tl.PropagateNan.ALL)
    FEW = tl.constexpr(8)  # boxes that a thread holds at a time

    @triton.jit
    def _likely(
        logits,  # [images, count, 1 + kinds]
        keys,  # [images, kinds, padded]: bits of a score and 1, which are ordered as scores are; 0: too low
        score,
        count,
        padded,
        kinds,
        by_image,
        by_prior,
        by_kind,
        BLOCK: tl.constexpr,
        ACROSS: tl.constexpr,
    ):
        """Some priors of an image a program."""
        image = tl.program_id(0).to(tl.int64)
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
        kind = tl.arange(0, ACROSS)[None, :]
        inside = place < count
        at = logits + image * by_image + place.to(tl.int64) * by_prior + kind.to(tl.int64) * by_kind
        x = tl.load(at, mask=inside & (kind <= kinds), other=0.0).to(tl.float32)
        x = tl.where(kind <= kinds, x, float("-inf"))
        power = tl.exp(x - tl.max(x, 1)[:, None])
        likely = tl.div_rn(power, tl.broadcast_to(tl.sum(power, 1)[:, None], (BLOCK, ACROSS)))
        likely = tl.where(likely == likely, likely, 0.0)  # not a number
        key = tl.where(inside & (likely > score), likely.to(tl.int32, bitcast=True) + 1, 0)
        own = keys + (image * kinds + kind - 1) * padded + place
        tl.store(own, key, mask=(place < padded) & (kind > 0) & (kind <= kinds))

    @triton.jit
    def _chosen(
        keys,  # [rows, padded]
        chosen,  # [rows, COUNT]: a key, then how far its prior is from the end; in no order; 0: none
        padded,
        COUNT: tl.constexpr,
        BLOCK: tl.constexpr,
        ALONG: tl.constexpr,
    ):
        """The best of a row a program: the least key that not too many are above of is found by halves."""
        row = tl.program_id(0).to(tl.int64)
        n = tl.arange(0, ALONG)
        key = tl.load(keys + row * padded + n, mask=n < padded, other=0)
        found = tl.sum((key > 0).to(tl.int32), 0)
        low = found * 0  # more are above of it
        high = tl.where(found > COUNT, tl.max(key, 0), 0)  # no more are above of it
        while high - low > 1:
            middle = low + (high - low) // 2
            above = tl.sum((key > middle).to(tl.int32), 0)
            high = tl.where(above > COUNT, high, middle)
            low = tl.where(above < COUNT, low, middle)  # as many: nothing is left to find
        over = key > high
        equal = key == tl.where(high > 0, high, -1)  # of which the first are taken
        before = tl.cumsum((over.to(tl.int32) << 16) | equal.to(tl.int32), 0)  # two sums at once
        above = tl.sum(over.to(tl.int32), 0)
        place = tl.where(over, before >> 16, above + (before & 0xFFFF)) - 1
        packed = (key.to(tl.int64) << 32) | (0x7FFFFFFF - n).to(tl.int64)
        chosen += row * COUNT
        tl.store(chosen + place, packed, mask=(over | equal) & (place < COUNT))
        rest = tl.arange(0, BLOCK)
        tl.store(chosen + rest, tl.zeros((BLOCK,), tl.int64), mask=(rest >= found) & (rest < COUNT))

    @triton.jit
    def _side(low, high):
        """Nothing where there is none, NaN where there is one."""
        return tl.maximum(high - low, 0.0, propagate_nan=EVERY)

    @triton.jit
    def _share(x):
        """Between 0 and 1, or NaN."""
        return tl.minimum(tl.maximum(x, 0.0, propagate_nan=EVERY), 1.0, propagate_nan=EVERY)

    @triton.jit
    def _packed(flags, BLOCK: tl.constexpr):
        """[BLOCK] → [BLOCK // 32]: the first is the lowest bit."""
        bits = tl.reshape(flags.to(tl.int32), (BLOCK // 32, 32)) << tl.arange(0, 32)[None, :]
        return tl.sum(bits, 1)  # no two have the same bit

    @triton.jit
    def _kept(
        chosen,  # [rows, COUNT]
        offsets,  # [images, priors, 4]
        priors,  # [priors, 4]
        boxes,  # [rows, BLOCK, 5]: corners and area, best first
        kept,  # [rows, COUNT, 5]: corners and score of those that are kept, best first; then scores of -1
        found,  # [images, most, 6]: what is nothing yet
        kinds,
        most,
        threshold,
        by_image,
        by_prior,
        by_side,
        from_prior,
        from_side,
        of_centre,
        of_size,
        COUNT: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """One row a program: without those that a better one shares too much with, until nothing changes.

        Bit for bit as `dsnet.detection.boxes` does it, but for the exponential: products are rounded before
        they are added.
        """
        row = tl.program_id(0).to(tl.int64)
        n = tl.arange(0, BLOCK)
        inside = n < COUNT
        packed = tl.sort(tl.load(chosen + row * COUNT + n, mask=inside, other=0), descending=True)
        there = packed > 0
        score = ((packed >> 32).to(tl.int32) - 1).to(tl.float32, bitcast=True)
        prior = 0x7FFFFFFF - (packed & 0x7FFFFFFF)

        at = offsets + row // kinds * by_image + prior * by_prior
        own = priors + prior * from_prior
        moved_x = tl.load(at, mask=there, other=0.0).to(tl.float32)
        moved_y = tl.load(at + by_side, mask=there, other=0.0).to(tl.float32)
        grown_x = tl.load(at + 2 * by_side, mask=there, other=0.0).to(tl.float32)
        grown_y = tl.load(at + 3 * by_side, mask=there, other=0.0).to(tl.float32)
        wide = tl.load(own + 2 * from_side, mask=there, other=0.0).to(tl.float32)
        high = tl.load(own + 3 * from_side, mask=there, other=0.0).to(tl.float32)
        x = tl.load(own, mask=there, other=0.0).to(tl.float32) + moved_x * of_centre * wide
        y = tl.load(own + from_side, mask=there, other=0.0).to(tl.float32) + moved_y * of_centre * high
        half_x = wide * tl.exp(grown_x * of_size) * 0.5
        half_y = high * tl.exp(grown_y * of_size) * 0.5
        left, top, right, bottom = (
            _share(x - half_x),
            _share(y - half_y),
            _share(x + half_x),
            _share(y + half_y),
        )

        area = _side(left, right) * _side(top, bottom)
        boxes += row * BLOCK * 5
        tl.store(boxes + 5 * n, left)
        tl.store(boxes + 5 * n + 1, top)
        tl.store(boxes + 5 * n + 2, right)
        tl.store(boxes + 5 * n + 3, bottom)
        tl.store(boxes + 5 * n + 4, area)
        tl.debug_barrier()  # any of them is read by all
        number = tl.sum(there.to(tl.int32), 0)
        word = tl.arange(0, BLOCK // 32)[:, None]
        over = tl.zeros((BLOCK // 32, BLOCK), tl.int32)  # better boxes that share too much, 32 of them a word
        for first in range(0, number, 32):
            bits = tl.zeros((BLOCK,), tl.int32)
            for part in range(0, 32, FEW):
                bit = part + tl.arange(0, FEW)[:, None]
                better = first + bit
                x0 = tl.load(boxes + 5 * better)
                y0 = tl.load(boxes + 5 * better + 1)
                x1 = tl.load(boxes + 5 * better + 2)
                y1 = tl.load(boxes + 5 * better + 3)
                width = _side(
                    tl.maximum(left[None, :], x0, propagate_nan=EVERY),
                    tl.minimum(right[None, :], x1, propagate_nan=EVERY),
                )
                height = _side(
                    tl.maximum(top[None, :], y0, propagate_nan=EVERY),
                    tl.minimum(bottom[None, :], y1, propagate_nan=EVERY),
                )
                common = width * height
                union = tl.load(boxes + 5 * better + 4) + area[None, :] - common
                some = (union > 0) & (common > 0)  # to divide nothing takes longer
                shared = tl.div_rn(tl.where(some, common, 1.0), tl.where(some, union, 1.0))
                shared = tl.where(some, shared, 0.0)
                bits += tl.sum(((shared > threshold) & (better < n[None, :])).to(tl.int32) << bit, 0)
            over = tl.where(word == first // 32, bits[None, :], over)

        alive = there
        words = _packed(alive, BLOCK)
        changed = number
        while changed > 0:  # as many rounds as the longest chain: what the best ones are told stays
            alive = there & (tl.sum(((over & words[:, None]) != 0).to(tl.int32), 0) == 0)
            earlier = words
            words = _packed(alive, BLOCK)
            changed = tl.sum((words != earlier).to(tl.int32), 0)

        before = tl.cumsum(alive.to(tl.int32), 0)
        left_over = tl.sum(alive.to(tl.int32), 0)
        place = tl.where(alive, before - 1, left_over + n - before)
        kept += row * COUNT * 5 + 5 * place
        tl.store(kept, left, mask=inside)
        tl.store(kept + 1, top, mask=inside)
        tl.store(kept + 2, right, mask=inside)
        tl.store(kept + 3, bottom, mask=inside)
        tl.store(kept + 4, tl.where(alive, score, -1.0), mask=inside)
        slot = row % kinds * COUNT + n
        found += (row // kinds * most + slot) * 6
        for side in tl.static_range(6):
            tl.store(found + side, tl.full((BLOCK,), -1.0, tl.float32), mask=inside & (slot < most))

    @triton.jit
    def _merged(
        kept,  # [images, kinds, COUNT, 5]
        found,  # [images, most, 6]
        most,
        KINDS: tl.constexpr,
        COUNT: tl.constexpr,
        BLOCK: tl.constexpr,
        LEVELS: tl.constexpr,
    ):
        """One row a program: how many of every other class are better is found by halves."""
        row = tl.program_id(0).to(tl.int64)
        image, kind = row // KINDS, row % KINDS
        n = tl.arange(0, BLOCK)
        own = kept + row * COUNT * 5 + 5 * n
        score = tl.load(own + 4, mask=n < COUNT, other=-1.0)
        place = n
        for other in range(KINDS):
            scores = kept + (image * KINDS + other) * COUNT * 5 + 4
            number = tl.zeros((BLOCK,), tl.int32)
            for level in tl.static_range(LEVELS):
                last = number + (BLOCK >> level) - 1
                value = tl.load(scores + 5 * last, mask=last < COUNT, other=-1.0)
                better = tl.where(other < kind, value >= score, value > score)
                number += tl.where(better, BLOCK >> level, 0)
            place += tl.where(other == kind, 0, number)
        there = (score >= 0) & (place < most)
        found += (image * most + place) * 6
        for side in tl.static_range(4):
            tl.store(found + side, tl.load(own + side, mask=there, other=0.0), mask=there)
        tl.store(found + 4, score, mask=there)
        tl.store(found + 5, kind.to(tl.float32), mask=there)
