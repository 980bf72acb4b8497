"""Operations between two layers: whatever they do to the channels, all routes stay consistent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import dsnet
from dsnet.models.convert import ConvertedNetwork, convert
from tests.support import assert_close, error_of
from tests.support.small_networks import conv_norm, random_images, randomise_module


class Do(nn.Module):
    """A module with a forward given as a function of the module and maps [B, 16, 8, 8]."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return (tokens + mixed).transpose(1, 2).reshape(x.shape)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.conv(x).chunk(2, 1)
        return a * b.sigmoid()


class SwappedParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.conv(x).split([8, 24], 1)
        return self.last(torch.cat([b, a], 1))


class SplitAttention(nn.Module):
    """Two branches in one convolution, weighted by a softmax over the branches."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).reshape(x.shape[0], 2, 16, *x.shape[2:])
        return (y * y.mean((3, 4), keepdim=True).softmax(1)).sum(1)


def shuffled(module: nn.Module, x: Tensor) -> Tensor:
    batch, channels, height, width = x.shape
    y = x.view(batch, 2, channels // 2, height, width).transpose(1, 2)
    return y.reshape(batch, channels, height, width)


def last_dimension(module: nn.Module, x: Tensor) -> Tensor:
    return module.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _root_mean_square(module: nn.Module, x: Tensor) -> Tensor:
    y = x.permute(0, 2, 3, 1)
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * module.g).permute(0, 3, 1, 2)


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


# module in the middle, and why the channels that it reads stay whole (None: they are sliced)
Middle = tuple[Callable[[], nn.Module], str | None]
OPERATIONS: dict[str, Middle] = {
    # layers
    "same_padding": (lambda: nn.Conv2d(16, 16, 3, padding="same"), None),
    "circular_padding": (lambda: nn.Conv2d(16, 16, 3, padding=1, padding_mode="circular"), None),
    "grouped_reflect": (
        lambda: nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect", groups=4),
        None,
    ),
    "depthwise_multiplier": (
        lambda: nn.Sequential(nn.Conv2d(16, 32, 3, padding=1, groups=16), nn.Conv2d(32, 16, 1)),
        None,
    ),
    "transposed_conv": (lambda: nn.ConvTranspose2d(16, 16, 2, 2), "convtranspose2d cannot be sliced"),
    "functional_conv": (lambda: Do(lambda m, x: F.conv2d(x, m.w, padding=1), w=_draw(16, 16, 3, 3)), None),
    "functional_linear": (
        lambda: Do(
            lambda m, x: F.linear(input=x.permute(0, 2, 3, 1), weight=m.w, bias=m.b).permute(0, 3, 1, 2),
            w=_draw(16, 16),
            b=_draw(16),
        ),
        None,
    ),
    "weight_norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(16, 16, 1)),
        "parametrizedconv2d cannot be sliced",
    ),
    "standardised_weight": (
        lambda: Do(lambda m, x: F.conv2d(x, m.w - m.w.mean((1, 2, 3), keepdim=True)), w=_draw(16, 16, 1, 1)),
        "conv2d cannot be sliced",
    ),
    "scaled_weight": (
        lambda: Do(lambda m, x: F.conv2d(x, m.w * 0.5), w=_draw(16, 16, 1, 1)),
        "conv2d cannot be sliced",
    ),
    "multihead_attention": (SelfAttention, "multiheadattention cannot be sliced"),
    "mixer": (
        lambda: Do(
            lambda m, x: m.b(F.gelu(m.a(x.flatten(2)))).unflatten(2, (8, 8)),
            a=nn.Linear(64, 24),
            b=nn.Linear(24, 64),
        ),
        None,
    ),
    # norms
    "group_norm": (lambda: nn.GroupNorm(4, 16), None),
    "group_norm_of_one": (lambda: nn.GroupNorm(1, 16), None),
    "group_norm_without_weights": (lambda: nn.GroupNorm(4, 16, affine=False), "group_norm cannot be sliced"),
    "functional_group_norm": (lambda: Do(lambda m, x: F.group_norm(x, 4)), "group_norm cannot be sliced"),
    "layer_norm": (lambda: Do(last_dimension, norm=nn.LayerNorm(16)), None),
    "layer_norm_without_bias": (lambda: Do(last_dimension, norm=nn.LayerNorm(16, bias=False)), None),
    "layer_norm_without_weights": (
        lambda: Do(last_dimension, norm=nn.LayerNorm(16, elementwise_affine=False)),
        None,
    ),
    "functional_layer_norm": (
        lambda: Do(lambda m, x: F.layer_norm(x.permute(0, 2, 3, 1), (16,)).permute(0, 3, 1, 2)),
        None,
    ),
    "layer_norm_of_maps": (lambda: nn.LayerNorm((16, 8, 8)), "a layer norm covers several dimensions"),
    "rms_norm": (lambda: Do(last_dimension, norm=nn.RMSNorm(16)), "rmsnorm cannot be sliced"),
    "rms_norm_in_steps": (lambda: Do(_root_mean_square, g=_draw(16)), "a sum or a mean covers it"),
    "instance_norm": (lambda: nn.InstanceNorm2d(16, affine=True), "instancenorm2d cannot be sliced"),
    "batch_norm_without_weights": (lambda: nn.BatchNorm2d(16, affine=False), "batch_norm cannot be sliced"),
    "normalise": (lambda: Do(lambda m, x: F.normalize(x, dim=1)), "it is normalised as a whole"),
    "softmax": (lambda: nn.Softmax(1), "it is normalised as a whole"),
    # element by element
    "prelu": (lambda: nn.PReLU(), "prelu cannot be sliced"),
    "scale_and_shift": (
        lambda: Do(lambda m, x: x * m.g.view(1, -1, 1, 1) + m.b[:, None, None], g=_draw(16), b=_draw(16)),
        None,
    ),
    "constant": (lambda: Do(lambda m, x: x + torch.arange(16.0).view(1, 16, 1, 1).to(x)), None),
    "where": (lambda: Do(lambda m, x: torch.where(x > 0, x, 0.1 * x)), None),
    "number_first": (lambda: Do(lambda m, x: 1.0 - x), None),
    "number_of_channels": (lambda: Do(lambda m, x: x * x.shape[1] ** -0.5), None),
    "addcmul": (lambda: Do(lambda m, x: torch.addcmul(x, x, m.g, value=0.5), g=_draw(16, 1, 1)), None),
    "expand_as": (
        lambda: Do(lambda m, x: x * m.c(x.mean((2, 3), keepdim=True)).expand_as(x), c=nn.Conv2d(16, 16, 1)),
        None,
    ),
    # parts, joints and other orders
    "gated": (Gated, None),
    "swapped_parts": (SwappedParts, None),
    "split_attention": (SplitAttention, None),
    "joined_chunks": (
        lambda: Do(lambda m, x: torch.cat(x.chunk(4, 1), 1)),
        "a batch norm reads it beside other channels",
    ),
    "joined_unequal_chunks": (
        lambda: nn.Sequential(
            nn.Conv2d(16, 30, 1), Do(lambda m, x: torch.cat(x.chunk(4, 1), 1)), nn.Conv2d(30, 16, 1)
        ),
        None,
    ),
    "batch_norm_of_a_concatenation": (
        lambda: nn.Sequential(
            Do(lambda m, x: torch.cat([x, m.c(x)], 1), c=nn.Conv2d(16, 8, 1)),
            nn.BatchNorm2d(24),
            nn.Conv2d(24, 16, 1),
        ),
        "a batch norm reads it beside other channels",
    ),
    "depthwise_of_a_concatenation": (
        lambda: nn.Sequential(
            Do(lambda m, x: torch.cat([x, m.c(x)], 1), c=nn.Conv2d(16, 8, 1)),
            nn.Conv2d(24, 24, 3, 1, 1, groups=24),
            nn.Conv2d(24, 16, 1),
        ),
        None,
    ),
    "half": (
        lambda: Do(lambda m, x: m.c(x[:, :8]), c=nn.Conv2d(8, 16, 1)),
        "a part of it is used",
    ),
    "shuffle": (lambda: Do(shuffled), "a batch norm reads it beside other channels"),
    "grouped_shuffle": (
        lambda: nn.Sequential(
            nn.Conv2d(16, 16, 1, groups=2), Do(shuffled), nn.Conv2d(16, 16, 3, 1, 1, groups=16)
        ),
        None,
    ),
    "groups_of_different_sizes": (
        lambda: nn.Sequential(
            nn.Conv2d(16, 24, 1),
            nn.Conv2d(24, 24, 3, 1, 1, groups=4),
            nn.Conv2d(24, 24, 3, 1, 1, groups=2),
            nn.Conv2d(24, 16, 1),
        ),
        None,
    ),
    "groups_that_do_not_divide": (
        lambda: nn.Sequential(
            nn.Conv2d(16, 24, 1),
            nn.Conv2d(24, 24, 3, 1, 1, groups=4),
            nn.GroupNorm(6, 24),
            nn.Conv2d(24, 16, 1),
        ),
        None,
    ),
    "pixel_shuffle": (
        lambda: nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(64, 64, 1), nn.PixelShuffle(2)),
        "pixelunshuffle cannot be sliced",
    ),
    "unflatten": (
        lambda: nn.Sequential(
            nn.Conv2d(16, 16, 1, groups=2),
            Do(lambda m, x: x.unflatten(1, (2, 8)).mul(2).flatten(1, 2)),
            nn.Conv2d(16, 16, 1, groups=2),
        ),
        None,
    ),
    "unflatten_module": (
        lambda: nn.Sequential(
            nn.Conv2d(16, 16, 1, groups=2),
            nn.Unflatten(1, (2, 8)),
            nn.Flatten(1, 2),
            nn.Conv2d(16, 16, 1, groups=2),
        ),
        None,
    ),
    "flip": (lambda: Do(lambda m, x: x.flip(1)), "flip cannot be sliced"),
    "roll_of_positions": (lambda: Do(lambda m, x: x.roll((1, 2), (2, 3))), None),
    "index": (lambda: Do(lambda m, x: x[:, [3, 1, 2, 0] * 4]), "getitem cannot be sliced"),
    "pad_channels": (
        lambda: Do(lambda m, x: m.c(F.pad(x, (0, 0, 0, 0, 0, 8))), c=nn.Conv2d(24, 16, 1)),
        "it is padded",
    ),
    "pad_positions": (lambda: Do(lambda m, x: F.pad(x, (1, 1, 1, 1))), None),
    "stack": (lambda: Do(lambda m, x: torch.stack([x, x * 2], 1).sum(1)), "stack cannot be sliced"),
    # reductions and products
    "mean_of_channels": (lambda: Do(lambda m, x: x * x.mean(1, keepdim=True)), "a sum or a mean covers it"),
    "maximum_of_channels": (lambda: Do(lambda m, x: x * x.max(1, keepdim=True)[0]), "max cannot be sliced"),
    "channel_attention": (
        lambda: Do(lambda m, x: (((y := x.flatten(2)) @ y.transpose(1, 2)).softmax(-1) @ y).reshape(x.shape)),
        "features of a head",
    ),
    "einsum": (
        lambda: Do(lambda m, x: torch.einsum("bchw,dc->bdhw", x, m.w), w=_draw(16, 16)),
        "einsum cannot be sliced",
    ),
    "sort": (lambda: Do(lambda m, x: torch.sort(x, 1)[0]), "sort cannot be sliced"),
    "fourier": (lambda: Do(lambda m, x: torch.fft.fft2(x).real), "fft_fft2 cannot be sliced"),
    "cumulative_sum": (lambda: Do(lambda m, x: x.cumsum(1)), "cumsum cannot be sliced"),
    "resize": (lambda: Do(lambda m, x: F.interpolate(x, (x.shape[2] // 2, x.size(-1) // 2))), None),
}


def network_around(middle: nn.Module) -> nn.Module:
    """A network whose first two convolutions are in front of the gate, the third right before the middle."""
    network = nn.Sequential(
        nn.Sequential(conv_norm(3, 8, 3, 2), nn.ReLU()),
        nn.Sequential(conv_norm(8, 16), nn.ReLU()),
        conv_norm(16, 16),
        nn.Sigmoid(),
        middle,
        nn.Conv2d(16, 16, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )
    return randomise_module(network.double()).eval()


def converted(middle: nn.Module) -> tuple[ConvertedNetwork, nn.Module]:
    network = network_around(middle)
    return convert(network, random_images(1), widths=(0.5, 1.0), gate="1"), network


@pytest.mark.parametrize("name", OPERATIONS)
def test_routes_stay_consistent(name: str) -> None:
    build, reason = OPERATIONS[name]
    model, network = converted(build())
    x = random_images(3)
    assert len(model.space) == 2
    reasons = {group.name: group.reason for group in model.conversion.groups}
    assert reasons["2.0"] == reason
    assert_close(model(x, 1), network(x), 1e-10)
    randomise_module(model, 3)
    state = model.run_prefix(x[:1])
    for route in model.space:
        expected = model(x, route)
        assert_close(dsnet.extract(model, route)(x), expected, 1e-10)
        extracted = dsnet.extract(model, route, fold_bn=False)
        assert_close(extracted(x), expected, 1e-10)
        cost = dsnet.cost(model, route)
        assert cost.params == sum(p.numel() for p in extracted.parameters())
        with FlopCounterMode(display=False) as flops, sdpa_kernel(SDPBackend.MATH):
            extracted(x[:1])
            model.gate_scores(state)
        assert cost.layers + cost.attention + cost.routing == flops.get_total_flops() // 2
    if not model.input_spec.fixed:
        x = random_images(2, 24)
        assert_close(dsnet.extract(model, 0, image_size=24)(x), model(x, 0), 1e-10)
    model.train()(random_images(3), 0).sum().backward()


def test_channels_that_are_shifted_stay_whole() -> None:
    """Sorted or not: a slice of them would not be a slice of the shifted ones."""
    for sort in (True, False):
        network, x = network_around(Do(lambda m, x: x.roll(1, 1))), random_images(2)
        model = convert(network, x, widths=(0.5, 1.0), gate="1", sort=sort)
        assert {g.name: g.reason for g in model.conversion.groups}["2.0"] is not None
        assert_close(model(x, 1), network(x), 1e-10)


def test_a_layer_used_twice_is_refused() -> None:
    message = error_of(lambda: converted(Do(lambda m, x: m.c(m.c(x)), c=nn.Conv2d(16, 16, 1))))
    assert "4.c.weight is used twice" in message
    assert "copy.deepcopy" in message


def test_activations_may_be_used_twice() -> None:
    model, network = converted(Do(lambda m, x: m.a(m.c(m.a(x))), a=nn.ReLU(), c=nn.Conv2d(16, 16, 1)))
    x = random_images(2)
    assert_close(model(x, 1), network(x), 1e-10)
    assert_close(dsnet.extract(model, 0)(x), model(x, 0), 1e-10)


def test_a_fixed_batch_size_in_the_code_is_an_error_that_names_it() -> None:
    middle = Do(
        lambda m, x: torch.bmm(x.flatten(2), m.w.expand(len(x), -1, -1)).view(x.shape), w=_draw(1, 64, 64)
    )
    message = error_of(lambda: converted(middle))
    assert "batch" in message
    assert "shape[0]" in message
