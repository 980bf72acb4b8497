"""Fingerprints of results: they see every bit, and nothing else."""

from __future__ import annotations

import pytest
import torch
from benchmarks.fingerprints import digest, figures, networks


def test_a_digest_sees_bits_types_and_shapes() -> None:
    x = torch.arange(6.0)
    assert digest(x) == digest(x.clone()) == digest(x.view(2, 3).T.contiguous().T.reshape(6))
    changed = x.clone()
    changed[3] += 1e-6
    others = [changed, x.double(), x.view(2, 3), x[:5]]
    assert len({digest(x), *map(digest, others)}) == 5
    assert digest(x[:3], x[3:]) != digest(x)


def test_figures_leave_out_times() -> None:
    assert figures('{"a": 1, "seconds": 2}') == figures('{"seconds": 3, "a": 1}')
    assert figures('{"a": [{"b": 1}]}') != figures('{"a": [{"b": 2}]}')


def test_networks_have_the_same_fingerprints_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dsnet.list_models", lambda kind: ["ds_mbnet_tiny", "ds_resnet_tiny", "ds_vit_plus_tiny"]
    )
    first = dict(networks())
    assert first == dict(networks())
    assert len(first) == 3 * 6
    assert len(set(first.values())) > 12, "routes alone may be the same"
