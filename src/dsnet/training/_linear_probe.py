"""A classifier fitted to the features of a pretrained network, as the start of its fine-tuning.

Gradients through a random classifier would change the pretrained features before the classifier is of use.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.routes import Route
from dsnet.slicing import Mode, batch_statistics
from dsnet.training.evaluation import eval_mode

__all__ = ["fit_classifier"]

ITERATIONS = 50  # of L-BFGS; the loss changes little after about 30
PENALTY = 1e-3  # on squared weights of normalised features


def fit_classifier(
    model: Supernet,
    batches: Iterable[tuple[Tensor, Tensor]],
    route: Route | int | None = None,
    *,
    keep_calibrated: bool = False,
    smoothing: float = 0.0,
) -> float:
    """Fit the classifier to the features of a route by logistic regression.

    Norms normalise as in training, by default by the statistics of each batch.

    Args:
        model: The network. Its other weights and its statistics do not change.
        batches: Normalised images [B, C, H, W] and labels [B].
        route: The route (default: the largest).
        keep_calibrated: Normalise by the stored statistics of calibrated keys.
        smoothing: Label smoothing.

    Returns:
        The share of these images that the network then classifies correctly.

    Raises:
        DsnetError: There is no batch.
    """
    classifier = model.head.classifier
    mode = Mode(statistics=batch_statistics, keep_calibrated=keep_calibrated)
    route = model.space.largest if route is None else model.space.resolve(route)
    features, labels, columns = _features(model, batches, route, mode)
    deviation, mean = torch.std_mean(features, dim=0)
    scale = 1 / deviation.clamp(min=1e-6)
    normalised = (features - mean) * scale
    weight = torch.zeros(classifier.out_features, normalised.shape[1], device=features.device)
    bias = torch.zeros(classifier.out_features, device=features.device)
    parameters = [weight.requires_grad_(), bias.requires_grad_()]
    optimizer = torch.optim.LBFGS(parameters, max_iter=ITERATIONS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = F.linear(normalised, weight, bias)
        value = F.cross_entropy(logits, labels, label_smoothing=smoothing) + PENALTY * weight.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        logits = F.linear(normalised, weight, bias)
        classifier.weight[:, columns] = (weight * scale).to(classifier.weight)
        if classifier.bias is not None:
            classifier.bias.copy_(bias - (weight * scale) @ mean)
    return float((logits.argmax(1) == labels).double().mean())


@torch.no_grad()
def _features(
    model: Supernet, batches: Iterable[tuple[Tensor, Tensor]], route: Route, mode: Mode
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the classifier's inputs [N, C] at a route, labels [N], and the C columns of its weight."""
    classifier: Any = model.head.classifier
    features: list[Tensor] = []
    labels: list[Tensor] = []

    def record(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        features.append(inputs[0].float())

    hook = classifier.register_forward_pre_hook(record)
    try:
        with eval_mode(model):
            for images, targets in batches:
                model(images, route, mode=mode)
                labels.append(targets.to(images.device))
    finally:
        hook.remove()
    if not labels:
        raise DsnetError("no images to fit the classifier to: the data gave no batch")
    inputs = torch.cat(features)
    network, own = model.at(route)
    columns = network.head.columns(network.slices(own.choices)[-1], inputs.shape[1])
    return inputs, torch.cat(labels), columns
