"""The losses of Stage I as pure functions, in float32 or better. Targets get no gradient.

Logits are [B, classes]; labels are class indices [B] or, for mixed images, probabilities [B, classes].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.slicing.functional import at_least_float32

__all__ = ["ensemble", "hard_labels", "hierarchical", "label_loss", "soft_loss"]


def label_loss(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Compute the cross-entropy with the labels, smoothed towards the uniform distribution."""
    return F.cross_entropy(_precise(logits), labels, label_smoothing=smoothing)


def soft_loss(logits: Tensor, target: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute the cross-entropy −Σ q log p, where q is the softmax of the target's logits (Eq. 28, 30).

    The temperature divides both logits; the loss is scaled by its square, so that gradients keep their size.
    """
    log_p = F.log_softmax(_precise(logits) / temperature, dim=1)
    q = F.softmax(_precise(target.detach()) / temperature, dim=1)
    return -(q * log_p).sum(1).mean() * temperature**2


def ensemble(logits: Sequence[Tensor]) -> Tensor:
    """Return logits whose softmax is the mean of the networks' probabilities (Eq. 31)."""
    log_p = torch.stack([F.log_softmax(_precise(one.detach()), dim=1) for one in logits])
    return log_p.logsumexp(0) - math.log(len(logits))


def hard_labels(logits: Tensor) -> Tensor:
    """Return the teacher's decisions as labels (Eq. 36)."""
    return logits.detach().argmax(1)


def hierarchical(predicted: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """Compute the mean of ‖ρ(f) − f′‖² / C over stages and images; C is a stage's full width (Eq. 33)."""
    pairs = zip(predicted, targets, strict=True)
    return torch.stack([F.mse_loss(_precise(p), _precise(t.detach())) for p, t in pairs]).mean()


def _precise(x: Tensor) -> Tensor:
    return x.to(at_least_float32(x.dtype))
