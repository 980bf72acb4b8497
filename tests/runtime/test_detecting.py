"""How a backend is chosen for a detector: by its network, without kernels that only give classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import dsnet
from dsnet import runtime
from dsnet.detection.fssd import Detector
from dsnet.runtime import making
from dsnet.runtime.choose import Choice
from tests.detection.test_fssd import TABLE


def test_auto_does_not_offer_kernels_for_classes() -> None:
    asked: list[Sequence[str]] = []

    def choose(model: object, *, candidates: Sequence[str], **given: Any) -> Choice:  # noqa: ANN401
        asked.append(candidates)
        return Choice("eager", {}, measured=True)

    detector = Detector(dsnet.create_model("ds_mbnet_tiny"), 2, TABLE).eval()
    with mock.patch.object(making, "choose_backend", choose):
        plan = runtime.compile(detector)
    assert plan.engine.backend == "eager"
    assert "triton" not in asked[0]
    assert {"eager", "inductor", "openvino"} <= set(asked[0])
