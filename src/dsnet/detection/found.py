"""From a detector's answers to boxes.

On a GPU all of it is one graph, then one copy to the host: many small kernels, each of them waited for, would
take as long as the detector itself.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

import numpy as np
import torch
from torch import Tensor

from dsnet.detection.boxes import decode, kept_of
from dsnet.detection.metrics import Detections
from dsnet.training.replay import Replay

__all__ = ["best_boxes", "detections_of"]

CANDIDATES = 200  # of an image and class that are compared with each other
GRAPHS = 8  # that are held at a time, each with memory of its own
IDLE = 1000  # calls after which another may have the place of a graph

Answered = Callable[[Tensor, Tensor, Tensor], Tensor]


@torch.inference_mode()  # also what a graph is made in: it could not be written to outside
def detections_of(
    offsets: Tensor,
    logits: Tensor,
    priors: Tensor,
    *,
    score: float = 0.01,
    overlap: float = 0.45,
    most: int = 200,
) -> list[Detections]:
    """Boxes of every image as shares of it, best first: [B, p, 4], [B, p, 1 + classes] and priors [p, 4].

    Those with a probability above ``score``, of overlapping ones of a class the best, ``most`` of an image.
    """
    function: Answered = functools.partial(best_boxes, score=score, overlap=overlap, most=most)
    if _unaided(offsets.device) and offsets.numel() and logits.shape[2] > 1 and most > 0:
        rows = _GRAPHED(function, (score, overlap, most), (offsets, logits, priors)).numpy()
    else:
        rows = function(offsets, logits, priors).cpu().numpy()
    counts = (rows[:, :, 4] >= 0).sum(1)
    wide = rows[:, : counts.max(initial=0)].astype(np.float64)
    boxes, scores, classes = wide[:, :, :4], wide[:, :, 4], wide[:, :, 5].astype(np.int64)
    return [
        Detections(boxes[image, :end], scores[image, :end], classes[image, :end])
        for image, end in enumerate(counts.tolist())
    ]


def best_boxes(
    offsets: Tensor, logits: Tensor, priors: Tensor, *, score: float, overlap: float, most: int
) -> Tensor:
    """Boxes of every image, best first [B, n, 6]: corners, score, class; a score of -1: there is none.

    No more than ``most``. On a GPU n depends on shapes alone, and nothing is waited for.
    """
    likely = logits.float().softmax(2)[:, :, 1:].transpose(1, 2).nan_to_num(0.0)  # [B, classes, p]
    images, kinds, count = likely.shape
    best, at = likely.flatten(0, 1).topk(min(CANDIDATES, count), dim=1)  # of every image and class
    unaided = _unaided(best.device)
    if not unaided:
        few = int((best > score).sum(1).max()) if best.numel() else 0  # the best stand first
        best, at = best[:, :few], at[:, :few]
    there, width = best > score, kinds * best.shape[1]
    place = at.reshape(images, width)
    moved = offsets.gather(1, place[:, :, None].expand(-1, -1, 4)).float()
    own = decode(moved, priors.float()[place]).clamp(0, 1).view(*at.shape, 4)
    if unaided:
        from dsnet.detection.suppress import kept_of_sorted

        kept = kept_of_sorted(own, there, threshold=overlap)
    else:
        kept = kept_of(own, torch.zeros_like(at), there, threshold=overlap)
    scores = best.masked_fill(~kept, -1.0)
    order = scores.view(images, width).argsort(stable=True, dim=1, descending=True)[:, :most]
    classes = torch.arange(kinds, device=at.device, dtype=torch.float32).repeat(images)
    rows = torch.cat([own, scores[:, :, None], classes[:, None, None].expand(-1, at.shape[1], 1)], 2)
    return rows.view(images, width, 6).gather(1, order[:, :, None].expand(-1, -1, 6))


def _unaided(device: torch.device) -> bool:
    """Whether a device does it without the host."""
    if device.type != "cuda":
        return False
    from dsnet.detection import suppress  # imports Triton

    return suppress.AVAILABLE


class _Graphed:
    """A function of answers as graphs, one for each form of what it is given: those that came first.

    Others run as they are, until a graph has not been asked for in a while: to make one takes longer than
    many calls.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: OrderedDict[Hashable, tuple[Answered, int]] = OrderedDict()  # and when it was last asked
        self._calls = 0

    def __call__(self, function: Answered, setting: Hashable, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """What the function of a setting gives, on the host; one caller at a time."""
        form = (setting, *((x.shape, x.stride(), x.dtype, x.device) for x in given))
        with self._lock:
            found = self._of(form, function)(*given)
            here = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            here.copy_(found, non_blocking=True)
            torch.cuda.current_stream(found.device).synchronize()  # the next may have another stream
        return here

    def _of(self, form: Hashable, function: Answered) -> Answered:
        self._calls += 1
        if form not in self._made and len(self._made) >= GRAPHS:
            if self._calls - next(iter(self._made.values()))[1] <= IDLE:
                return function
            self._made.popitem(last=False)
        made, _ = self._made.pop(form, (Replay(function), 0))
        self._made[form] = made, self._calls
        return made


_GRAPHED = _Graphed()
