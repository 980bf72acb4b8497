"""Decoding and non-maximum suppression of boxes in four kernels, without waiting for the GPU.

The result is that of `dsnet.detection.postprocess.best_boxes`: of equal scores the lower prior, then the
lower class ranks first.
"""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803
import torch
from torch import Tensor

from dsnet.errors import DsnetError
from dsnet.kernels.launch import AVAILABLE, on_device_of, power_of_two

if AVAILABLE:
    import triton
    import triton.language as tl

__all__ = ["MAX_PRIORS", "select_boxes"]

MAX_PRIORS = 1 << 15  # a program holds the scores of all priors


def select_boxes(
    offsets: Tensor,
    logits: Tensor,
    priors: Tensor,
    *,
    score: float,
    overlap: float,
    max_boxes: int,
    candidates: int,
    variances: tuple[float, float],
) -> Tensor:
    """Decode boxes, suppress overlapping ones of a class and return the best of each image. Triton only.

    Args:
        offsets: Box regressions [B, p, 4]; these and ``logits`` need not be contiguous.
        logits: Class logits [B, p, 1 + classes], the background first.
        priors: Centres and sizes [p, 4].
        score: Boxes need a score above this.
        overlap: A box is suppressed if its IoU with a better one is above this.
        max_boxes: How many boxes to return for an image, at most.
        candidates: How many boxes of each image and class are compared with each other, at most.
        variances: Scales of the centres' and the sizes' regressions.

    Returns:
        Corners, score and class [B, n, 6], best first; a score of -1 marks an empty row. n is ``max_boxes``,
        or less where there cannot be as many.

    Raises:
        DsnetError: If the numbers of priors differ, or there are more than `MAX_PRIORS`.
    """
    images, count, classes = logits.shape[0], logits.shape[1], logits.shape[2] - 1
    if offsets.shape != (images, count, 4) or priors.shape != (count, 4) or count > MAX_PRIORS:
        raise DsnetError(
            f"expected offsets [B, p, 4], logits [B, p, 1 + classes] and priors [p, 4] with the same p, no "
            f"more than {MAX_PRIORS}, got {[list(x.shape) for x in (offsets, logits, priors)]}"
        )
    few, padded = min(candidates, count), -(-count // 16) * 16  # rows aligned for wide loads
    rows, max_boxes = images * classes, min(max_boxes, classes * few)
    keys = torch.empty(rows, padded, dtype=torch.int32, device=logits.device)
    chosen = torch.empty(rows, few, dtype=torch.int64, device=logits.device)
    kept = torch.empty(rows, few, 5, dtype=torch.float32, device=logits.device)
    result = torch.empty(images, max_boxes, 6, dtype=torch.float32, device=logits.device)
    across, along, block = power_of_two(1 + classes), power_of_two(padded), power_of_two(few)
    step, whole = max(1, 2048 // across), max(32, block)
    boxes = torch.empty(rows, whole, 5, dtype=torch.float32, device=logits.device)
    with on_device_of(logits):
        _score_keys[(images, -(-padded // step))](
            logits, keys, float(score), count, padded, classes, *logits.stride(), step, across, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
        _top_candidates[(rows,)](
            keys, chosen, padded, few, block, along, num_warps=max(1, along // 1024),
            enable_fp_fusion=False,
        )  # fmt: skip
        _suppress[(rows,)](
            chosen, offsets, priors, boxes, kept, result, classes, max_boxes, float(overlap),
            *offsets.stride(), *priors.stride(), *variances, few, whole, num_warps=min(8, whole // 32),
            enable_fp_fusion=False,
        )  # fmt: skip
        _merge_classes[(rows,)](
            kept, result, max_boxes, classes, few, block, block.bit_length(), num_warps=max(1, block // 64),
            enable_fp_fusion=False,
        )  # fmt: skip
    return result


if AVAILABLE:
    PROPAGATE_NAN = tl.constexpr(tl.PropagateNan.ALL)
    BOXES_PER_STEP = tl.constexpr(8)

    @triton.jit
    def _score_keys(
        logits,  # [images, count, 1 + classes]
        keys,  # [images, classes, padded]: the score's bits + 1, ordered as scores are; 0: score too low
        score,
        count,
        padded,
        classes,
        by_image,
        by_prior,
        by_class,
        BLOCK: tl.constexpr,
        ACROSS: tl.constexpr,
    ):
        """Compute the softmax scores of some priors of one image per program."""
        image = tl.program_id(0).to(tl.int64)
        prior = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
        label = tl.arange(0, ACROSS)[None, :]
        mask = prior < count
        offset = image * by_image + prior.to(tl.int64) * by_prior + label.to(tl.int64) * by_class
        x = tl.load(logits + offset, mask=mask & (label <= classes), other=0.0).to(tl.float32)
        x = tl.where(label <= classes, x, float("-inf"))
        power = tl.exp(x - tl.max(x, 1)[:, None])
        probability = tl.div_rn(power, tl.broadcast_to(tl.sum(power, 1)[:, None], (BLOCK, ACROSS)))
        probability = tl.where(probability == probability, probability, 0.0)  # NaN
        key = tl.where(mask & (probability > score), probability.to(tl.int32, bitcast=True) + 1, 0)
        keys += (image * classes + label - 1) * padded + prior
        tl.store(keys, key, mask=(prior < padded) & (label > 0) & (label <= classes))

    @triton.jit
    def _top_candidates(
        keys,  # [rows, padded]
        chosen,  # [rows, COUNT], unordered: a key, and in the lower bits the inverted prior; 0: none
        padded,
        COUNT: tl.constexpr,
        BLOCK: tl.constexpr,
        ALONG: tl.constexpr,
    ):
        """Select the best COUNT keys of one row per program: bisect for the COUNT-th largest key."""
        row = tl.program_id(0).to(tl.int64)
        n = tl.arange(0, ALONG)
        key = tl.load(keys + row * padded + n, mask=n < padded, other=0)
        available = tl.sum((key > 0).to(tl.int32), 0)
        low = available * 0  # more than COUNT keys are above
        high = tl.where(available > COUNT, tl.max(key, 0), 0)  # at most COUNT keys are above
        while high - low > 1:
            middle = low + (high - low) // 2
            above = tl.sum((key > middle).to(tl.int32), 0)
            high = tl.where(above > COUNT, high, middle)
            low = tl.where(above < COUNT, low, middle)  # exactly COUNT: the search is over
        over = key > high
        equal = key == tl.where(high > 0, high, -1)  # the first of these fill the rest
        before = tl.cumsum((over.to(tl.int32) << 16) | equal.to(tl.int32), 0)  # two sums in one
        above = tl.sum(over.to(tl.int32), 0)
        position = tl.where(over, before >> 16, above + (before & 0xFFFF)) - 1
        packed = (key.to(tl.int64) << 32) | (0x7FFFFFFF - n).to(tl.int64)
        chosen += row * COUNT
        tl.store(chosen + position, packed, mask=(over | equal) & (position < COUNT))
        rest = tl.arange(0, BLOCK)
        tl.store(chosen + rest, tl.zeros((BLOCK,), tl.int64), mask=(rest >= available) & (rest < COUNT))

    @triton.jit
    def _length(low, high):
        """Return the length of an interval, at least 0; propagates NaN."""
        return tl.maximum(high - low, 0.0, propagate_nan=PROPAGATE_NAN)

    @triton.jit
    def _clamp(x):
        """Clamp to 0 … 1; propagates NaN."""
        return tl.minimum(tl.maximum(x, 0.0, propagate_nan=PROPAGATE_NAN), 1.0, propagate_nan=PROPAGATE_NAN)

    @triton.jit
    def _pack_bits(flags, BLOCK: tl.constexpr):
        """Pack flags [BLOCK] into words [BLOCK // 32], the first flag in the lowest bit."""
        bits = tl.reshape(flags.to(tl.int32), (BLOCK // 32, 32)) << tl.arange(0, 32)[None, :]
        return tl.sum(bits, 1)  # all bits are distinct

    @triton.jit
    def _suppress(
        chosen,  # [rows, COUNT]
        offsets,  # [images, priors, 4]
        priors,  # [priors, 4]
        boxes,  # [rows, BLOCK, 5]: corners and area, best first
        kept,  # [rows, COUNT, 5]: corners and score of boxes that are kept, best first; then scores of -1
        result,  # [images, max_boxes, 6], to be filled with -1
        classes,
        max_boxes,
        threshold,
        by_image,
        by_prior,
        by_coordinate,
        priors_by_prior,
        priors_by_coordinate,
        centre_variance,
        size_variance,
        COUNT: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Suppress the boxes of one row per program: repeat until nothing changes.

        Bitwise equal to `dsnet.detection.boxes` except for the exponential: products are rounded before they
        are added.
        """
        row = tl.program_id(0).to(tl.int64)
        n = tl.arange(0, BLOCK)
        mask = n < COUNT
        packed = tl.sort(tl.load(chosen + row * COUNT + n, mask=mask, other=0), descending=True)
        valid = packed > 0
        score = ((packed >> 32).to(tl.int32) - 1).to(tl.float32, bitcast=True)
        prior = 0x7FFFFFFF - (packed & 0x7FFFFFFF)

        offsets += row // classes * by_image + prior * by_prior
        priors += prior * priors_by_prior
        moved_x = tl.load(offsets, mask=valid, other=0.0).to(tl.float32)
        moved_y = tl.load(offsets + by_coordinate, mask=valid, other=0.0).to(tl.float32)
        grown_x = tl.load(offsets + 2 * by_coordinate, mask=valid, other=0.0).to(tl.float32)
        grown_y = tl.load(offsets + 3 * by_coordinate, mask=valid, other=0.0).to(tl.float32)
        wide = tl.load(priors + 2 * priors_by_coordinate, mask=valid, other=0.0).to(tl.float32)
        high = tl.load(priors + 3 * priors_by_coordinate, mask=valid, other=0.0).to(tl.float32)
        x = tl.load(priors, mask=valid, other=0.0).to(tl.float32)
        y = tl.load(priors + priors_by_coordinate, mask=valid, other=0.0).to(tl.float32)
        x = x + moved_x * centre_variance * wide
        y = y + moved_y * centre_variance * high
        half_x = wide * tl.exp(grown_x * size_variance) * 0.5
        half_y = high * tl.exp(grown_y * size_variance) * 0.5
        left, right = _clamp(x - half_x), _clamp(x + half_x)
        top, bottom = _clamp(y - half_y), _clamp(y + half_y)
        area = _length(left, right) * _length(top, bottom)
        boxes += row * BLOCK * 5
        tl.store(boxes + 5 * n, left)
        tl.store(boxes + 5 * n + 1, top)
        tl.store(boxes + 5 * n + 2, right)
        tl.store(boxes + 5 * n + 3, bottom)
        tl.store(boxes + 5 * n + 4, area)
        tl.debug_barrier()  # every thread reads all boxes
        number = tl.sum(valid.to(tl.int32), 0)
        word = tl.arange(0, BLOCK // 32)[:, None]
        over = tl.zeros((BLOCK // 32, BLOCK), tl.int32)  # better boxes that overlap too much, 32 per word
        for first in range(0, number, 32):
            bits = tl.zeros((BLOCK,), tl.int32)
            for part in range(0, 32, BOXES_PER_STEP):
                bit = part + tl.arange(0, BOXES_PER_STEP)[:, None]
                better = first + bit
                x0 = tl.load(boxes + 5 * better)
                y0 = tl.load(boxes + 5 * better + 1)
                x1 = tl.load(boxes + 5 * better + 2)
                y1 = tl.load(boxes + 5 * better + 3)
                width = _length(
                    tl.maximum(left[None, :], x0, propagate_nan=PROPAGATE_NAN),
                    tl.minimum(right[None, :], x1, propagate_nan=PROPAGATE_NAN),
                )
                height = _length(
                    tl.maximum(top[None, :], y0, propagate_nan=PROPAGATE_NAN),
                    tl.minimum(bottom[None, :], y1, propagate_nan=PROPAGATE_NAN),
                )
                common = width * height
                union = tl.load(boxes + 5 * better + 4) + area[None, :] - common
                overlaps = (union > 0) & (common > 0)  # dividing 0 by 0 is slow
                iou = tl.div_rn(tl.where(overlaps, common, 1.0), tl.where(overlaps, union, 1.0))
                iou = tl.where(overlaps, iou, 0.0)
                bits += tl.sum(((iou > threshold) & (better < n[None, :])).to(tl.int32) << bit, 0)
            over = tl.where(word == first // 32, bits[None, :], over)

        alive = valid
        words = _pack_bits(alive, BLOCK)
        changed = number
        while changed > 0:  # one round per link of the longest chain of suppressions
            alive = valid & (tl.sum(((over & words[:, None]) != 0).to(tl.int32), 0) == 0)
            earlier = words
            words = _pack_bits(alive, BLOCK)
            changed = tl.sum((words != earlier).to(tl.int32), 0)

        before = tl.cumsum(alive.to(tl.int32), 0)
        alive_count = tl.sum(alive.to(tl.int32), 0)
        position = tl.where(alive, before - 1, alive_count + n - before)
        kept += row * COUNT * 5 + 5 * position
        tl.store(kept, left, mask=mask)
        tl.store(kept + 1, top, mask=mask)
        tl.store(kept + 2, right, mask=mask)
        tl.store(kept + 3, bottom, mask=mask)
        tl.store(kept + 4, tl.where(alive, score, -1.0), mask=mask)
        slot = row % classes * COUNT + n
        result += (row // classes * max_boxes + slot) * 6
        for side in tl.static_range(6):
            tl.store(result + side, tl.full((BLOCK,), -1.0, tl.float32), mask=mask & (slot < max_boxes))

    @triton.jit
    def _merge_classes(
        kept,  # [images, classes, COUNT, 5]
        result,  # [images, max_boxes, 6]
        max_boxes,
        CLASSES: tl.constexpr,
        COUNT: tl.constexpr,
        BLOCK: tl.constexpr,
        LEVELS: tl.constexpr,
    ):
        """Rank the boxes of one row per program: bisect for the better boxes of every other class."""
        row = tl.program_id(0).to(tl.int64)
        image, label = row // CLASSES, row % CLASSES
        n = tl.arange(0, BLOCK)
        boxes = kept + row * COUNT * 5 + 5 * n
        score = tl.load(boxes + 4, mask=n < COUNT, other=-1.0)
        rank = n
        for other in range(CLASSES):
            scores = kept + (image * CLASSES + other) * COUNT * 5 + 4
            ahead = tl.zeros((BLOCK,), tl.int32)
            for level in tl.static_range(LEVELS):
                last = ahead + (BLOCK >> level) - 1
                value = tl.load(scores + 5 * last, mask=last < COUNT, other=-1.0)
                better = tl.where(other < label, value >= score, value > score)
                ahead += tl.where(better, BLOCK >> level, 0)
            rank += tl.where(other == label, 0, ahead)
        valid = (score >= 0) & (rank < max_boxes)
        result += (image * max_boxes + rank) * 6
        for side in tl.static_range(4):
            tl.store(result + side, tl.load(boxes + side, mask=valid, other=0.0), mask=valid)
        tl.store(result + 4, score, mask=valid)
        tl.store(result + 5, label.to(tl.float32), mask=valid)
