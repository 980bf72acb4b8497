"""Outputs that are not finite: an error for that image in cascades, sessions, predictions; no NaN in JSON."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dsnet
from dsnet.calibration import collect
from dsnet.cli import main
from dsnet.data.transforms.augment import normalise
from dsnet.errors import DsnetWarning
from dsnet.inference.classify import FailedImage, Prediction, open_predictor
from dsnet.models import GateState, Supernet
from dsnet.models.group_by_route import Routable
from dsnet.routing import GatePolicy, RoutedOutput, Router
from dsnet.routing.route_outputs import simulate
from dsnet.routing.session import Session
from dsnet.runtime.plan import Plan
from dsnet.slicing import Mode
from dsnet.training import load_model, save_checkpoint
from tests.support import error_of
from tests.support.routers import ONE, SEVERAL, cascade, gate

pytestmark = pytest.mark.xdist_group("predict")

BAD = [1, 4]  # images


def damaged(model: Supernet, x: Tensor, *, at: set[int] | None = None) -> Supernet:
    """The network, of one gate, gives NaN for these images, at some routes or at all of them."""
    plain, marks = model.run_last_segment, model.run_prefix(x[BAD]).encoding.pooled.sum(1)

    def finish(state: GateState, choices: tuple[int, ...], mode: Mode | None = None) -> Tensor:
        logits = plain(state, choices, mode)
        if at is not None and model.space.of_choices(choices).number not in at:
            return logits
        hit = torch.isclose(state.encoding.pooled.sum(1)[:, None], marks, rtol=1e-9).any(1)
        return logits.masked_fill(hit[:, None], float("nan"))

    model.run_last_segment = finish  # type: ignore[method-assign]
    return model


class Poisoned(GatePolicy):
    """Gates whose network gives NaN for these images of every batch."""

    def __call__(self, model: Routable[Any], x: Tensor, allowance: float | None = None) -> RoutedOutput:
        output = super().__call__(model, x, allowance)
        output.logits[BAD] = float("nan")
        return output


def test_a_margin_of_nan_is_never_confident() -> None:
    model, x, routed = cascade(ONE, 0.0)  # no image goes on
    first, last = routed.policy.routes[0], routed.policy.routes[-1]  # type: ignore[union-attr]
    assert routed.run(x).routes.unique().tolist() == [first]
    damaged(model, x, at={first})
    output = routed.run(x)
    expected = torch.full((len(x),), first)
    expected[BAD] = routed.policy.routes[1]  # type: ignore[union-attr]
    assert torch.equal(output.routes, expected)
    assert output.finite.all()
    damaged(model, x)
    output = routed.run(x)
    expected[BAD] = last
    assert torch.equal(output.routes, expected)
    assert (~output.finite).nonzero()[:, 0].tolist() == BAD
    alone = routed.run(x[BAD[:1]])
    assert alone.routes.tolist() == [last]
    capped = routed.policy(
        model, x, len(x) * routed.policy.min_cost(model) + 1.5 * routed.router.costs.largest
    )
    assert all(int(capped.routes[i]) != first for i in BAD)  # they are the first to go on


@pytest.mark.parametrize("name", [ONE, SEVERAL])
@pytest.mark.parametrize("cap", [None, "90%"])
def test_sessions_do_not_count_failed_images_as_answered(name: str, cap: str | None) -> None:
    _, x, routed = gate(name)
    clean = Session(routed, cap=cap)
    routes = clean(x).routes
    assert isinstance(routed.policy, GatePolicy)
    poisoned = Poisoned(costs=routed.policy.costs, weight=routed.policy.weight)
    object.__setattr__(routed, "policy", poisoned)
    session = Session(routed, cap=cap)
    with pytest.warns(DsnetWarning, match=f"{len(BAD)} of {len(x)} images have no answer"):
        output = session(x)
    assert (~output.finite).nonzero()[:, 0].tolist() == BAD
    assert torch.equal(output.routes, routes)
    kept = [route for i, route in enumerate(routes.tolist()) if i not in BAD]
    assert session.route_counts == dict(sorted(Counter(kept).items()))
    assert (session.images, session.failed) == (len(x), len(BAD))
    assert session.mean_cost == pytest.approx(clean.mean_cost)  # they were paid for
    assert session.recent_cost == pytest.approx(clean.recent_cost)
    drift = session.drift()
    assert drift is None if cap else drift is not None and drift.images == len(x) - len(BAD)
    assert json.loads(json.dumps(session.to_dict(), allow_nan=False))["failed"] == len(BAD)


def test_a_cap_holds_with_scores_of_nan() -> None:
    model, x, routed = gate(ONE, weight=-3.0)
    score = model.gate_scores
    model.gate_scores = lambda state: torch.full_like(score(state), float("nan"))  # type: ignore[method-assign]
    least = routed.policy.min_cost(model)
    session = Session(routed, cap=1.01 * least)
    session(x)
    assert session.recent_cost <= 1.01 * least


def test_outputs_of_nan_are_not_calibrated_on() -> None:
    model, x, _ = gate(ONE)
    damaged(model, x, at={2})
    labels = torch.zeros(len(x), dtype=torch.long)
    message = error_of(lambda: collect(model, [(x[10:], labels[10:]), (x[:10], labels[:10])]))
    assert "not finite" in message
    assert "routes [2]" in message
    assert "30 to 39" in message
    assert collect(model, [(x[10:], labels[10:])]).margins.isfinite().all()
    known = collect(model, [(x[10:], labels[10:])])
    known.margins[3, 0] = float("nan")
    _, _, routed = cascade(ONE, 0.0)
    assert simulate(routed.policy, known).columns[3] > 0


def test_the_command_reports_images_without_an_answer(
    run: Path,
    files: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = Plan.__call__

    def poisoned(plan: Plan, x: Tensor, route: int) -> Tensor:
        logits = real(plan, x, route)
        logits[0] = float("nan")
        logits[2, 3] = float("inf")
        return logits

    monkeypatch.setattr(Plan, "__call__", poisoned)
    words = ["predict", str(run), *files[:5], "--route", "1", "--device", "cpu"]
    assert main([*words, "--json"]) == 1
    captured = capsys.readouterr()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in captured.out.splitlines()]
    assert [line["path"] for line in lines] == files[:5]
    assert [sorted(line) == ["error", "path"] for line in lines] == [True, False, True, False, False]
    assert lines[0]["error"] == "has no answer: the logits of route 1 are not finite"
    assert captured.err.splitlines()[0] == f"dsnet: {files[0]} {lines[0]['error']}"
    assert main([*words, "--out", str(tmp_path / "found.jsonl"), "--top", "3"]) == 1
    assert json.loads((tmp_path / "found.jsonl").read_text().splitlines()[0]) == lines[0]
    assert capsys.readouterr().out.endswith("; 2 without an answer\n")
    assert main(words) == 1
    results = list(open_predictor(run, route=1, device="cpu")(files[:3]))
    assert [type(result) for result in results] == [FailedImage, Prediction, FailedImage]


def test_weights_and_normalisation_of_nan_are_refused(run: Path, tmp_path: Path) -> None:
    for values in ((float("nan"), 1.0), (0.5, float("nan")), (0.5, 0.0), (float("inf"), 1.0), (0.5, -1.0)):
        mean, std = values
        message = error_of(
            lambda mean=mean, std=std: normalise(torch.zeros(1, 3, 8, 8), (mean,) * 3, (std,) * 3)  # type: ignore[misc]
        )
        assert "deviation above 0" in message
    model = load_model(run, "final")
    with torch.no_grad():
        model.head.classifier.weight[1, 2] = float("nan")
    saved = {"input": {"mean": [0.5] * 3, "std": [0.2] * 3}}
    save_checkpoint(tmp_path, "final", model, step=1, data=saved)
    message = error_of(lambda: open_predictor(tmp_path, route=0, device="cpu"))
    assert "1 of" in message
    assert "head.classifier.weight" in message
    with torch.no_grad():
        model.head.classifier.weight[1, 2] = 0.0
    zero = {"input": {"mean": [0.5] * 3, "std": [0.0] * 3}}
    assert "input.std[0] is 0.0" in error_of(
        lambda: save_checkpoint(tmp_path, "final", model, step=2, data=zero)
    )
    data = dsnet.load(run).routed("45%").router.to_dict()
    data["curve"][0][1] = float("nan")
    assert "needs a finite accuracy, got nan" in error_of(lambda: Router.from_dict(data))
