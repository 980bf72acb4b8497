"""What a conversion says about itself: groups, layers, widths, and why some stay whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dsnet.models.convert import Conversion, ConvertedNetwork, GroupReport, convert
from tests.support.small_networks import SMALL_NETWORKS, random_images


def converted(name: str, **options: object) -> ConvertedNetwork:
    small = SMALL_NETWORKS[name]
    return convert(small.full(), random_images(1), widths=(0.5, 1.0), gate=small.gate, **options)


def test_the_table_lists_group_layers_channels_widths_and_reason() -> None:
    lines = str(converted("plain").conversion).splitlines()
    rows = [line.split(maxsplit=3) for line in lines[1:6]]
    assert lines[0].split("  ")[0] == "group"
    assert all(word in lines[0] for word in ("layers", "channels", "width per route", "whole because"))
    assert rows == [
        ["0", "3", "8", "in front of the gate"],
        ["3", "3", "12", "crosses the gate"],
        ["6", "3", "24", "12 24"],
        ["9", "2", "16", "8 16"],
        ["13", "1", "5", "classes"],
    ]
    assert lines[-1] == "2 of 5 groups are sliced; the gate decides behind 3; routes run 4, 4 blocks"


def test_columns_are_aligned() -> None:
    lines = str(converted("residual").conversion).splitlines()
    start = lines[0].index("channels")
    table = lines[: lines.index("")]
    assert len(table) == 9
    assert all(line[start - 1] == " " and line[start].isdigit() for line in table[1:])
    assert all(line == line.rstrip() for line in lines)


REASONS = {
    "residual": {
        "stem.0": "residual stream",
        "blocks.0.conv1.0": "in front of the gate",
        "blocks.1.conv1.0": None,
        "blocks.1.conv2.0": "residual stream",
        "blocks.2.conv1.0": None,
        "blocks.3.conv1.0": None,
        "blocks.4.conv1.0": None,
        "fc": "classes",
    },
    "concatenated": {
        "stem.0": "in front of the gate",
        "blocks.0.wide.0": "in front of the gate",
        "blocks.0.slim.0": "in front of the gate",
        "blocks.0.mix.0": "crosses the gate",
        "blocks.1.wide.0": None,
        "blocks.1.slim.0": None,
        "blocks.1.mix.0": None,
        "blocks.2.wide.0": None,
        "blocks.2.slim.0": None,
        "blocks.2.mix.0": None,
        "fc": "classes",
    },
    "channels_last": {
        "stem": "residual stream",
        "blocks.0.fc1": "in front of the gate",
        "blocks.1.fc1": None,
        "blocks.2.fc1": None,
        "head": "classes",
    },
}


@pytest.mark.parametrize("name", REASONS)
def test_reasons(name: str) -> None:
    groups = converted(name).conversion.groups
    assert {group.name: group.reason for group in groups} == REASONS[name]
    for group in groups:
        if group.reason is not None:
            assert group.widths == (group.channels, group.channels)
        else:
            assert group.widths == (group.channels // 2, group.channels)


@pytest.mark.parametrize("name", SMALL_NETWORKS)
def test_every_layer_with_weights_is_in_a_group(name: str) -> None:
    network = SMALL_NETWORKS[name].full()
    conversion = converted(name).conversion
    kinds = nn.Conv2d | nn.Linear | nn.BatchNorm2d | nn.LayerNorm
    expected = {key for key, module in network.named_modules() if isinstance(module, kinds)}
    assert expected <= {layer for group in conversion.groups for layer in group.layers}
    assert len({group.name for group in conversion.groups}) == len(conversion.groups)
    assert all(len(set(group.layers)) == len(group.layers) for group in conversion.groups)


def test_the_layers_of_groups() -> None:
    groups = {group.name: group for group in converted("depthwise").conversion.groups}
    expand = {f"blocks.1.{n}" for n in ("expand.0", "expand.1", "depthwise.0", "depthwise.1", "se.reduce")}
    assert set(groups["blocks.1.expand.0"].layers) == expand | {"blocks.1.se.expand", "blocks.1.project.0"}
    assert set(groups["blocks.1.se.reduce"].layers) == {"blocks.1.se.reduce", "blocks.1.se.expand"}
    assert set(groups["conv_head.0.0"].layers) == {"conv_head.0.0", "conv_head.0.1", "classifier"}
    groups = {group.name: group for group in converted("grouped").conversion.groups}
    assert groups["blocks.1.first.0"].channels == 4
    assert set(groups["blocks.1.first.0"].layers) == {
        f"blocks.1.{n}" for n in ("first.0", "first.1", "grouped.0", "grouped.1", "last.0")
    }


def test_heads_and_hidden_features_of_a_transformer() -> None:
    sliced = converted("transformer").conversion.sliced
    layers = {frozenset(group.layers): (group.channels, group.widths) for group in sliced}
    assert layers == {
        frozenset({f"blocks.{i}.attention.qkv", f"blocks.{i}.attention.proj"}): (4, (2, 4)) for i in (1, 2)
    } | {frozenset({f"blocks.{i}.mlp.0", f"blocks.{i}.mlp.2"}): (24, (12, 24)) for i in (1, 2)}


def test_depths_and_error_are_reported() -> None:
    conversion = converted("residual", depths=(1 / 3, 1.0)).conversion
    assert conversion.depths == (4, 6)
    assert "routes run 4, 6 blocks" in str(conversion)
    assert conversion.error is not None
    assert conversion.error <= 1e-12
    meta = SMALL_NETWORKS["plain"].build(1.0).to("meta").eval()
    other = convert(meta, torch.zeros(1, 3, 16, 16, device="meta"), gate="3", widths=(0.5, 1.0))
    assert other.conversion.error is None


def test_a_report_is_plain_data() -> None:
    group = GroupReport(name="a", layers=("a", "b"), channels=8, widths=(4, 8))
    other = GroupReport(name="c", layers=("c",), channels=3, widths=(3, 3), reason="classes")
    conversion = Conversion(groups=(group, other), gate="a", depths=(2, 2))
    assert conversion.sliced == (group,)
    assert hash(conversion) == hash(Conversion(groups=(group, other), gate="a", depths=(2, 2)))
    assert str(conversion).splitlines()[1].split() == ["a", "2", "8", "4", "8"]
    assert str(conversion).splitlines()[2].split() == ["c", "1", "3", "classes"]


def test_a_network_without_sliced_channels_has_one_route_and_says_so() -> None:
    """Two layers that only a residual sum connects: their channels stay whole by default."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.branch = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1)
            self.last = nn.Conv2d(8, 8, 3, 1, 1)
            self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.stem(x).relu()
            y = y + self.branch(y)
            y = y + self.last(y)
            return self.head(y)

    model = convert(Sum().eval(), torch.zeros(1, 3, 16, 16))
    assert len(model.space) == 1
    assert "No channels are sliced" in str(model.conversion)
    sliced = convert(Sum().eval(), torch.zeros(1, 3, 16, 16), widths=(1.0, 1.0), residual=(0.5, 1.0))
    assert len(sliced.space) == 2
