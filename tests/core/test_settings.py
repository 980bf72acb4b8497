"""Settings: plain data, changes by key, and errors that name the key and the alternatives."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from dsnet.core.settings import from_plain, keys_of, override, parse_assignments, to_plain
from dsnet.training.config import TrainConfig
from tests.support import error_of


def changed(*assignments: str) -> TrainConfig:
    return override(TrainConfig(), parse_assignments(assignments))


def test_settings_survive_json() -> None:
    config = changed("augment.crop=(0.2, 1)", "options.norm=group", "optim.lr=1", "scheme.name=h-ib+mvco")
    assert from_plain(TrainConfig, json.loads(json.dumps(to_plain(config)))) == config
    assert config.augment.crop == (0.2, 1.0)
    assert config.options == {"norm": "group"}
    sizes = changed("options.image_sizes=8,16", "options.table=[{'a': [1, 2]}]")
    assert sizes.options == {"image_sizes": (8, 16), "table": ({"a": (1, 2)},)}
    plain = json.loads(json.dumps(to_plain(sizes)))
    assert plain == to_plain(sizes)
    assert from_plain(type(sizes), plain) == sizes
    assert config.optim.lr == 1.0


def test_unambiguous_short_keys_are_resolved() -> None:
    config = changed("lr=0.3", "epochs=7", "model=ds_vit_plus_tiny", "channels_last=true", "route=none")
    assert (config.optim.lr, config.optim.epochs, config.model) == (0.3, 7, "ds_vit_plus_tiny")
    assert config.run.channels_last is True
    assert "data.name or scheme.name" in error_of(lambda: changed("name=x"))


@pytest.mark.parametrize(
    ("assignment", "told"),
    [
        ("optim.lrr=1", "no setting 'optim.lrr'; did you mean optim.lr?"),
        ("epoch=1", "did you mean optim.epochs?"),
        ("zzz=1", "possible: model, options, start, weights"),
        ("optim.kind=adam", "optim.kind must be sgd or adamw, not 'adam'"),
        ("optim.epochs=1.5", "optim.epochs must be a whole number, not 1.5"),
        ("optim.lr=fast", "optim.lr must be a number, not 'fast'"),
        ("optim.lr=-1", "lr must be above 0"),
        ("run.compile=1", "run.compile must be true or false, not 1"),
        ("augment.crop=0.5", "augment.crop must be (a number, a number) or none"),
        ("optim=sgd", "no setting 'optim'"),
        ("scheme.name=xx", "unknown scheme 'xx'"),
        ("scheme.name=ed", "needs a teacher"),
        ("scheme.teacher=x", "takes no teacher"),
        ("scheme.route=1", "a single route needs scheme.name=label"),
        ("scheme.joint=gumbel", "joint training needs scheme.name=label"),
        ("data.hold_out=1", "hold_out must be at least 0 and below 1"),
        ("optim.batch=0", "batch must be at least 1, not 0"),
        ("lr", "--set takes key=value, not 'lr'"),
    ],
)
def test_errors_name_the_key_and_what_is_possible(assignment: str, told: str) -> None:
    assert told in error_of(lambda: changed(assignment))


def test_every_key_can_be_set_to_its_value() -> None:
    config = TrainConfig()
    plain = to_plain(config)
    for key, _ in keys_of(TrainConfig):
        value = plain
        for part in key.split("."):
            value = value[part]
        assert override(config, {key: value}) == config


@dataclass(frozen=True, kw_only=True)
class _Lists:
    some: tuple[int, ...] = ()
    nested: tuple[tuple[float, ...], ...] = ((2.0,),)


def test_lists_of_any_length() -> None:
    found = from_plain(_Lists, {"some": [1, 2, 3], "nested": [[2, 3.5], []]})
    assert found == _Lists(some=(1, 2, 3), nested=((2, 3.5), ()))
    assert from_plain(_Lists, json.loads(json.dumps(to_plain(found)))) == found
    assert override(found, {"some": []}).some == ()
    message = error_of(lambda: from_plain(_Lists, {"some": [1, "two"]}))
    assert "some must be (a whole number, …), not [1, 'two']" in message
    assert "some must be" in error_of(lambda: override(found, {"some": 3}))
