"""Modules with fewer passes over memory against themselves, and the kernels against plain formulas."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dsnet
from dsnet.counts import Shape
from dsnet.detection.deploy._partition import pack_detector, split_detector
from dsnet.errors import DsnetError
from dsnet.extract import extract
from dsnet.kernels import launch
from dsnet.kernels.activations import ACTIVATIONS
from dsnet.kernels.elementwise import affine, affine_means, scale_by_attention, spatial_means
from dsnet.kernels.gather import FeatureRows, extract_patches, pointwise_conv
from dsnet.kernels.rows import add_layer_norm, linear, scatter_rows
from dsnet.runtime.partition.per_image_norm import Affine
from dsnet.runtime.partition.segments import in_precision, pack
from dsnet.runtime.passes.fusion import fuse, leaves_scaling
from tests.support import assert_close, randomise
from tests.support.detectors import NAMES
from tests.support.detectors import detector as detector_of
from tests.support.networks import network, pictures

NETWORKS = [
    ("ds_mbnet_tiny", None),
    ("ds_mbnet_plus_tiny", None),
    ("ds_resnet_tiny", "stage"),
    ("ds_resnet_plus_tiny", None),
    ("ds_vit_plus_tiny", None),
    ("three_gates", "prefix"),
]

needs_interpreter = pytest.mark.skipif(
    not launch.AVAILABLE or torch.cuda.is_available(), reason="needs Triton's interpreter"
)


@pytest.fixture
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", True)


def same(module: nn.Module, inputs: tuple[Tensor, ...], tolerance: float = 1e-10) -> nn.Module:
    made = fuse(module)
    with torch.no_grad():
        expected, actual = module(*inputs), made(*inputs)
        if leaves_scaling(made):
            features, scores, by = actual
            actual = scale_by_attention(features, by), scores
    for a, b in zip(_all(actual), _all(expected), strict=True):
        assert_close(a, b, tolerance)
    return made


def _all(actual: Tensor | tuple[Tensor, ...]) -> Iterator[Tensor]:
    yield from actual if isinstance(actual, tuple) else (actual,)


@pytest.mark.parametrize(("name", "bn_key"), NETWORKS)
def test_fused_segments_and_networks_give_the_same_results(name: str, bn_key: str | None) -> None:
    model = network(name, torch.float64, bn_key)
    options = [model.gate(g).choices[:2] for g in range(len(model.gates))]
    for part in pack(model, options).values():
        x, *which = part.example(3)
        if which:
            which = [torch.arange(3) % part.histories]
        same(part.module, (x.double(), *which))
    made = same(extract(model, model.space.largest.number), (pictures(model, 2),))
    convs = [layer for layer in made.modules() if isinstance(layer, nn.Conv2d)]
    assert convs
    assert all(conv.bias is None for conv in convs)


@pytest.mark.parametrize("name", ["mobilenet_v1", "resnet50", "deit"])
def test_static_networks(name: str) -> None:
    torch.manual_seed(0)
    model, side = dsnet.create_model(name).double().eval(), 224 if name == "deit" else 64
    made = same(model, (torch.randn(1, 3, side, side).double(),))
    assert not any(isinstance(layer, nn.BatchNorm2d | nn.LayerNorm) for layer in made.modules())
    if name == "deit":
        with pytest.raises(DsnetError, match="224 × 224, not 64 × 64"):
            made(torch.randn(1, 3, 64, 64).double())
        return
    through = [layer for layer in made.modules() if isinstance(layer, Affine)]
    bare = sum(layer.act is None for layer in through)
    assert bare == (4 if name == "resnet50" else 0)  # the shortcuts with a convolution
    assert len(through) == (53 if name == "resnet50" else 27)


@pytest.mark.parametrize("name", NAMES)
def test_detectors(name: str) -> None:
    detector = copy.deepcopy(detector_of(name)).double()
    choices = detector.network.gate(0).choices[:2]
    split, head = split_detector(detector, choices, image_size=32)
    for parts in (pack_detector(detector, choices, image_size=32), split):
        for part in parts.values():
            same(part.module, tuple(x.double() for x in part.example(2)))
    assert head is not None
    rows = torch.randn(3, head.numbers).double()
    same(head.module, (rows, torch.tensor([0, 1, 1]) % len(choices)))


def test_fused_modules_share_weights_without_changing_them() -> None:
    conv = nn.Conv2d(3, 4, 3)
    made = fuse(nn.Sequential(conv, nn.ReLU()))
    (own,) = (layer for layer in made.modules() if isinstance(layer, nn.Conv2d))
    assert own.weight is conv.weight
    assert conv.bias is not None


@needs_interpreter
@pytest.mark.usefixtures("_interpreted")
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    channels=st.sampled_from([3, 16, 40, 300]),
    side=st.integers(1, 7),
    images=st.integers(1, 3),
    act=st.sampled_from(list(ACTIVATIONS)),
    add=st.booleans(),
    keyed=st.booleans(),
)
def test_kernels_of_channels(channels: int, side: int, images: int, act: str, add: bool, keyed: bool) -> None:
    draw = torch.Generator().manual_seed(channels + side)
    shape = (images, channels, side, side + 1)
    x, added = (torch.randn(shape, generator=draw).to(memory_format=torch.channels_last) for _ in "ab")
    table, which = torch.randn(4, 2 * channels, generator=draw), torch.randint(4, (images,), generator=draw)
    by = torch.randn(images, channels, generator=draw)
    rest = (which if keyed else None, added if add else None, act)
    plain = [t.contiguous() for t in (x, added)]  # kernels do not read those
    others = (which if keyed else None, plain[1] if add else None, act)
    assert_close(affine(x, table, *rest), affine(plain[0], table, *others), 1e-5)
    y, mean = affine_means(x, table, *rest)
    assert_close(y, affine(plain[0], table, *others), 1e-5)
    assert_close(mean, y.mean((2, 3)), 1e-5)
    assert_close(scale_by_attention(x, by), scale_by_attention(plain[0], by), 1e-5)
    assert_close(spatial_means(x), spatial_means(plain[0]), 1e-5)
    assert spatial_means(x.half(), torch.float32).dtype == torch.float32


@needs_interpreter
@pytest.mark.usefixtures("_interpreted")
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    channels=st.sampled_from([4, 17, 130]),
    less=st.sampled_from([0, 1, 3]),
    positions=st.integers(1, 9),
    rows=st.integers(1, 5),
)
def test_kernels_of_rows(channels: int, less: int, positions: int, rows: int) -> None:
    draw = torch.Generator().manual_seed(channels + positions)
    table = torch.randn(6, positions, channels, generator=draw)
    x = torch.randn(rows, positions, channels - less, generator=draw)
    at = torch.randperm(6, generator=draw)[:rows]
    by, before = torch.randn(rows, channels - less, generator=draw), table.clone()
    expected = table.clone()
    expected[at] = torch.cat([x, torch.zeros(rows, positions, less)], 2)
    scatter_rows(table, at, x)
    assert torch.equal(table, expected)
    scatter_rows(before, at, x, by)
    expected[at, :, : channels - less] = x * (1 + by.tanh())[:, None]
    assert_close(before, expected, 1e-6)
    widths = torch.zeros(6, dtype=torch.int32)
    behind = torch.full_like(table, 7.0)
    scatter_rows(behind, at, x, None, widths)
    assert torch.equal(behind[at, :, : channels - less], x)
    assert bool((behind[at, :, channels - less :] == 7).all())
    assert widths.tolist() == [channels - less if row in at.tolist() else 0 for row in range(6)]

    a, b = (torch.randn(rows, positions, channels, generator=draw) for _ in "ab")
    norm = nn.LayerNorm(channels)
    nn.init.normal_(norm.weight)
    with torch.no_grad():
        total, normed = add_layer_norm(a, b, norm.weight, norm.bias, norm.eps)
        assert_close(total, a + b, 1e-6)
        assert_close(normed, norm(a + b), 1e-5)
        total, normed = add_layer_norm(a, None, norm.weight, norm.bias, norm.eps)
        assert total is a
        assert_close(normed, norm(a), 1e-5)


@needs_interpreter
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    channels=st.sampled_from([16, 40, 80]),
    outs=st.sampled_from([5, 16, 130]),
    side=st.integers(1, 6),
    stride=st.integers(1, 3),
    images=st.integers(1, 4),
    ragged=st.booleans(),
)
def test_features_are_read_from_rows(
    monkeypatch: pytest.MonkeyPatch,
    channels: int,
    outs: int,
    side: int,
    stride: int,
    images: int,
    ragged: bool,
) -> None:
    draw = torch.Generator().manual_seed(channels + side)
    shape = Shape(channels, side, side + 1)
    table = torch.randn(6, channels * side * (side + 1), generator=draw)
    at = torch.randint(0, 6, (images,), generator=draw)
    widths = 8 * torch.randint(1, channels // 8 + 1, (6,), generator=draw, dtype=torch.int32)
    rows = FeatureRows(table, at, shape, widths if ragged else None, 8)
    conv = nn.Conv2d(channels, outs, 1, stride, bias=False)
    dense = table[at].view(images, side, side + 1, channels).permute(0, 3, 1, 2).clone()
    if ragged:
        for image, row in zip(dense, at.tolist(), strict=True):
            image[int(widths[row]) :] = 0
    with torch.no_grad():
        expected = conv(dense)
        for interpreted in (False, True):
            monkeypatch.setattr(launch, "INTERPRETED", interpreted)
            actual = pointwise_conv(rows, conv.weight, stride)
            assert_close(actual, expected, 1e-4)
    assert actual.is_contiguous(memory_format=torch.channels_last)


@needs_interpreter
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    channels=st.integers(1, 5),
    size=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    sides=st.tuples(st.integers(3, 9), st.integers(4, 9)),
    images=st.integers(1, 3),
    ragged=st.booleans(),
)
def test_patches(
    monkeypatch: pytest.MonkeyPatch,
    channels: int,
    size: tuple[int, int],
    sides: tuple[int, int],
    images: int,
    ragged: bool,
) -> None:
    draw = torch.Generator().manual_seed(channels + sum(sides))
    shape = Shape(channels, *sides)
    table, at = (
        torch.randn(4, math.prod(shape), generator=draw),
        torch.randint(0, 4, (images,), generator=draw),
    )
    widths = torch.randint(1, channels + 1, (4,), generator=draw, dtype=torch.int32)
    rows = FeatureRows(table, at, shape, widths if ragged else None)
    down, across = sides[0] // size[0], sides[1] // size[1]
    expected = F.unfold(rows.dense, size, stride=size).view(images, channels, -1, down, across)
    expected = expected.permute(0, 3, 4, 2, 1).flatten(3)
    for interpreted in (False, True):
        monkeypatch.setattr(launch, "INTERPRETED", interpreted)
        assert torch.equal(extract_patches(rows, size), expected)
        assert torch.equal(extract_patches(rows.dense, size), expected)
        assert torch.equal(extract_patches(rows.dense.contiguous(), size), expected)


@needs_interpreter
@pytest.mark.usefixtures("_interpreted")
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    channels=st.sampled_from([3, 16, 200]),
    outs=st.sampled_from([1, 4, 40]),
    rows=st.integers(1, 20),
    act=st.sampled_from(["none", "relu"]),
)
def test_linear(channels: int, outs: int, rows: int, act: str) -> None:
    torch.manual_seed(channels)
    layer, x = nn.Linear(channels, outs), torch.randn(rows, channels)
    with torch.no_grad():
        expected = ACTIVATIONS[act](layer(x))
        actual = linear(x, layer, act)
        assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(linear(x[:1], layer, act), actual[:1])


@needs_interpreter
@pytest.mark.usefixtures("_interpreted")
def test_a_network_by_kernels() -> None:
    for name in ("ds_resnet_tiny", "ds_vit_plus_tiny"):
        model = network(name, torch.float32, "stage" if name == "ds_resnet_tiny" else None)
        module = extract(model, 0).to(memory_format=torch.channels_last)
        same(module, (pictures(model, 1).to(memory_format=torch.channels_last),), 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["ds_resnet_tiny", "ds_vit_plus_tiny", "ds_mbnet_plus_tiny"])
def test_on_a_gpu(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model = network(name, torch.float64, "stage" if name == "ds_resnet_tiny" else None)
    x = pictures(model, 5)
    module = extract(model, 0)
    with torch.no_grad():
        expected = module(x)
        made = fuse(module).cuda().to(dtype).to(memory_format=torch.channels_last)
        actual = made(x.cuda().to(dtype).to(memory_format=torch.channels_last)).double().cpu()
    assert_close(actual, expected, 1e-4 if dtype == torch.float32 else 8e-2)


class _Odd(nn.Module):
    """Graphs that are hard to rewrite: modules called twice, several readers, in-place activations."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.conv = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        self.linear, self.rows = nn.Linear(4, 4), nn.LayerNorm(4)
        self.act, self.changes = nn.ReLU(), nn.ReLU(inplace=True)
        self.pool, self.flat, self.lines = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Flatten(2)
        self.plain = nn.BatchNorm2d(4, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        pooled = x.mean((2, 3))
        if self.kind == "norm twice":
            return self.act(self.norm(x)) - self.norm(2 * x)
        if self.kind == "conv twice":
            return self.act(self.conv(x)) - self.conv(2 * x)
        if self.kind == "linear twice":
            return self.act(self.linear(pooled)) - self.linear(2 * pooled)
        if self.kind == "rows twice":
            return self.rows(pooled + 1) - self.rows(pooled + self.linear(pooled))
        if self.kind == "means twice":
            return self.flat(self.pool(self.norm(x))) + self.flat(self.pool(self.norm(3 * x)))
        if self.kind == "nobody reads it":
            self.linear(pooled)
            self.pool(x)
            return self.norm(x)
        if self.kind == "changed in place":
            y = self.norm(x)
            z = self.changes(y)
            total = pooled + self.linear(pooled)
            self.changes(total)
            return self.flat(self.pool(y)) + self.rows(total) + z.sum()
        if self.kind == "lines":
            return self.lines(self.pool(x))
        if self.kind == "no weights":
            return self.plain(x)
        return 2 * (1 + torch.tanh(pooled)).unsqueeze(-1).unsqueeze(-1)


@pytest.mark.parametrize(
    "kind",
    [
        *("norm twice", "conv twice", "linear twice", "rows twice", "means twice", "nobody reads it"),
        *("changed in place", "lines", "no weights", "a number times attention"),
    ],
)
def test_unusual_graphs_give_the_same_results(kind: str) -> None:
    torch.manual_seed(0)
    module = _Odd(kind).double().eval()
    randomise(module)
    same(module, (torch.randn(2, 4, 3, 3).double(),))


class _Scaled(nn.Module):
    """Channels times attention, as gates write it, and in ways that are not fused."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        attention = torch.tanh(x.mean((2, 3)))
        if self.kind == "two":
            return x * (2 + attention).unsqueeze(-1).unsqueeze(-1)
        if self.kind == "other axis":
            return x * (1 + attention).unsqueeze(-1).unsqueeze(2)
        scale = (1 + attention).unsqueeze(-1).unsqueeze(-1)
        return x * scale + scale if self.kind == "read twice" else x * scale


@pytest.mark.parametrize("kind", ["plain", "two", "other axis", "read twice"])
def test_attention_is_fused_as_gates_write_it(kind: str) -> None:
    torch.manual_seed(0)
    made = same(_Scaled(kind), (torch.randn(2, 4, 3, 3).double(),))
    called = {node.target for node in made.graph.nodes}
    assert (scale_by_attention in called) is (kind == "plain")
    assert (torch.tanh in called) is (kind != "plain")


@pytest.mark.parametrize(
    ("options", "fused"),
    [
        ({"stride": 2}, True),
        ({"stride": 2, "bias": False}, True),
        ({"stride": 1}, False),
        ({"stride": 2, "groups": 2}, False),
        ({"stride": 2, "padding": 1}, False),
        ({"stride": 2, "dilation": 2}, False),
    ],
)
def test_convolutions_of_patches_become_matrix_products(options: dict[str, Any], fused: bool) -> None:
    torch.manual_seed(0)
    made = same(nn.Sequential(nn.Conv2d(4, 6, 2, **options)).double(), (torch.randn(2, 4, 7, 6).double(),))
    assert any(isinstance(layer, nn.Conv2d) for layer in made.modules()) is not fused


def test_scales_stay_in_float32() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8).eval().requires_grad_(False)
    nn.init.normal_(norm.running_mean, std=4.0)  # type: ignore[arg-type]
    x = torch.randn(2, 8, 5, 5).bfloat16()
    expected = norm(x.float())
    module = in_precision(fuse(nn.Sequential(norm)), torch.bfloat16)
    actual = module(x)
    assert actual.dtype == torch.bfloat16
    same_numbers = (actual == expected.bfloat16()).double().mean()  # rounded once, at the end
    assert float(same_numbers) > 0.98
