"""A router of the user: registered by name, it works like the built-in ones."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import dsnet
from dsnet.calibration import Calibration, calibrate, collect, simulate
from dsnet.calibration.compare import compare
from dsnet.cli import main
from dsnet.routing import (
    CostTable,
    OperatingPoint,
    Routed,
    Router,
    Session,
    list_routers,
    policies,
    register_router,
)
from tests.support import error_of, random_model
from tests.support.docs import example_modules
from tests.support.routers import ONE, spread


@pytest.fixture
def own() -> Iterator[type[policies.Policy]]:
    """The example's policy, registered while a test runs."""
    module = ModuleType("careful")
    sys.modules["careful"] = module
    exec(example_modules()["careful"], module.__dict__)
    yield policies.policy_class("careful")
    del policies._POLICIES["careful"], sys.modules["careful"]


def test_calibration_plans_and_sessions_run_a_registered_router(own: type[policies.Policy]) -> None:
    model, x = spread(ONE, 40)
    labels = model(x, model.space.largest).argmax(1)
    costs = CostTable.of_model(model)
    outputs = collect(model, [(x, labels)])
    calibration = calibrate(outputs, costs)
    assert list(calibration.routers) == ["gate", "cascade", "single", "careful"]
    again = Calibration.from_dict(json.loads(json.dumps(calibration.to_dict())))
    assert again == calibration
    router = again.router("careful")
    low, high = again.budget_range("careful")
    assert low < high
    budget = (low + high) / 2
    routed = Routed(model, router, budget)
    assert isinstance(routed.policy, own)
    output = routed.run(x)
    seen = simulate(routed.policy, outputs)
    assert [outputs.routes[c].number for c in seen.columns.tolist()] == output.routes.tolist()
    assert seen.cost == pytest.approx(router.point(budget).cost)
    session = Session(routed)
    session(x)
    assert session.mean_cost == pytest.approx(seen.cost)
    rows = {row.router for row in compare(outputs, again, [budget]).rows}
    assert "careful" in rows
    assert {row.router for row in compare(outputs, again.only("careful"), [budget]).rows} == {"careful"}
    plan = dsnet.runtime.compile(routed, backend="eager", device="cpu")
    assert torch.equal(plan.run(x).routes, output.routes)
    assert torch.allclose(plan.run(x).logits, output.logits)
    assert torch.equal(plan.at(high).run(x).routes, routed.at(high).run(x).routes)


def test_unregistered_routers_are_refused_with_a_list() -> None:
    costs = CostTable.of_model(random_model(ONE))
    router = Router(
        kind="gate", costs=costs, curve=(OperatingPoint(cost=1e5, accuracy=0.5, parameters=(0.0,)),)
    )
    for kind in ("mine", None, ["gate"]):  # reported before anything else that is missing
        message = error_of(lambda kind=kind: Router.from_dict({"kind": kind}))  # type: ignore[misc]
        assert "unknown router" in message
        assert "gate, cascade, single" in message
        assert "--import MODULE" in message
    written = {**router.to_dict(), "class": "mine.Router"}  # by a subclass, as an earlier version allowed
    assert "written by the class 'mine.Router'" in error_of(lambda: Router.from_dict(written))


def test_registration_checks_name_and_class() -> None:
    assert list_routers() == ["gate", "cascade", "single"]
    for name in ("gate", "auto", "two words"):
        message = error_of(lambda name=name: register_router(name)(policies.GatePolicy))  # type: ignore[misc]
        assert f"router {name!r} is" in message
        assert "registered: gate, cascade, single" in message
    assert "derived from Policy" in error_of(lambda: register_router("mine")(Router))  # type: ignore[type-var]


def test_the_command_line_takes_a_registered_router(
    run: Path,
    files: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "careful.py").write_text(example_modules()["careful"])
    run = Path(shutil.copytree(run, tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def command(name: str, *arguments: str, router: str = "careful", status: int = 0) -> str:
        options = ["--name", "gated", "--device", "cpu", "--router", router]
        assert main([name, str(run), *arguments, *options]) == status
        written = capsys.readouterr()
        return written.err if status else written.out

    for budget in (["--budget", "45%"], []):
        assert "unknown router 'careful'" in command("predict", files[0], *budget, status=2)
    assert "needs a budget" in command("predict", files[0], router="single", status=2)
    own = ["--import", "careful"]
    try:
        budget = str(json.loads(command("calibrate", *own, "--json"))["budgets"][4]["target"])
        assert "4 images" in command("predict", *files[:4], *own, "--budget", budget)
        assert "needs a budget" in command("predict", files[0], *own, status=2)
        rows = json.loads(command("evaluate", *own, "--routed", "--json"))["rows"]
        assert {row["router"] for row in rows} == {"careful"}
    finally:
        policies._POLICIES.pop("careful", None)
        sys.modules.pop("careful", None)
