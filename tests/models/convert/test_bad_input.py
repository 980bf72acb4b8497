"""Messages for what cannot be converted: what was given, and what is possible."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsnet
from dsnet.models.convert import ConvertOptions, convert
from tests.support import error_of, need_timm
from tests.support.small_networks import (
    SMALL_NETWORKS,
    ResidualNet,
    plain_cnn,
    random_images,
    randomise_module,
)


def plain() -> nn.Module:
    return plain_cnn().eval()


def example(size: int = 16) -> Tensor:
    return torch.zeros(1, 3, size, size)


def message_of(network: Any, x: Any = None, **options: Any) -> str:  # noqa: ANN401
    return error_of(lambda: convert(network, example() if x is None else x, **options))


def assert_says(message: str, *parts: str) -> None:
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"


# --- the network ------------------------------------------------------------------------------------------
def test_training_mode() -> None:
    assert_says(message_of(plain_cnn()), "training mode", "15 modules", "itself", "call .eval()")
    network = plain()
    network[4].train()
    assert_says(message_of(network), "training mode", "1 modules", "the first is 4", "call .eval()")


@pytest.mark.parametrize("given", ["resnet18", None, plain_cnn, torch.zeros(3)])
def test_no_network(given: object) -> None:
    assert_says(message_of(given), "nn.Module", type(given).__name__)


def test_control_flow() -> None:
    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = plain()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) if x.sum() > 0 else self.body(-x)

    message = message_of(Decides().eval())
    assert_says(message, "cannot trace module Decides", __file__, "in forward", "torch.where")


def test_shared_modules() -> None:
    conv = nn.Conv2d(12, 12, 3, 1, 1)
    network = nn.Sequential(*plain()[:6], conv, nn.ReLU(), conv, *plain()[6:]).eval()
    assert_says(message_of(network), "6.weight is used twice", "copy.deepcopy")


def test_a_shared_norm() -> None:
    norm = nn.BatchNorm2d(12)
    network = nn.Sequential(
        *plain()[:4], norm, nn.ReLU(), nn.Conv2d(12, 12, 1), norm, nn.ReLU(), *plain()[6:]
    ).eval()
    assert_says(message_of(network), "is used twice", "copy.deepcopy")


@pytest.mark.parametrize(
    ("end", "name"),
    [
        ([nn.Conv2d(16, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()], "Flatten"),
        ([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5), nn.Softmax(1)], "Softmax"),
        ([nn.Conv2d(16, 5, 1)], "Conv2d"),
    ],
)
def test_a_network_that_ends_without_a_linear_layer(end: list[nn.Module], name: str) -> None:
    network = nn.Sequential(*plain()[:11], *end).eval()
    assert_says(message_of(network), f"ends with {name}", "linear layer", "nn.Linear")


def test_a_network_without_blocks() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8), nn.ReLU(), nn.Linear(8, 5)).eval()
    assert_says(message_of(network), "blocks")
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )
    assert_says(message_of(network.eval()), "blocks")


def test_a_network_without_weights() -> None:
    assert_says(message_of(nn.Sequential(nn.ReLU(), nn.Flatten()).eval()), "no weights")


def test_several_outputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = plain()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.body(x)
            return y, y

    assert_says(message_of(Two().eval()), "tuple", "logits", "wrap it")


def test_weights_of_another_architecture() -> None:
    model = convert(plain(), example(), widths=(0.5, 1.0))
    other = convert(ResidualNet().eval(), example(), widths=(0.5, 1.0))
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*Unexpected key"):
        model.load_state_dict(other.state_dict())


# --- the example ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(3, 16, 16), (16, 16), (1, 1, 3, 16, 16), (0, 3, 16, 16)])
def test_an_example_of_another_shape(shape: tuple[int, ...]) -> None:
    assert_says(message_of(plain(), torch.zeros(shape)), str(list(shape)), "[batch, channels, height, width]")


@pytest.mark.parametrize("given", [(1, 3, 16, 16), 16, "image"])
def test_an_example_that_is_no_tensor(given: object) -> None:
    assert_says(message_of(plain(), given), type(given).__name__, "[batch, channels, height, width]")


def test_an_example_of_another_type() -> None:
    assert_says(message_of(plain(), example().long()), "float")
    message = message_of(plain(), example().double())
    assert_says(message, "torch.float64", "torch.float32", "convert one of them")


def test_an_example_on_another_device() -> None:
    assert_says(message_of(plain(), example().to("meta")), "meta", "cpu", "convert one of them")


def test_an_example_with_other_channels() -> None:
    assert_says(message_of(plain(), torch.zeros(1, 4, 16, 16)), "0 (Conv2d)", "channels", "example")


def test_an_example_that_is_not_square() -> None:
    assert_says(message_of(plain(), torch.zeros(1, 3, 16, 32)), "square", "16 × 32")


def test_an_example_of_another_size_than_the_option() -> None:
    assert_says(message_of(plain(), image_size=32), "image_size=32", "16 × 16")


# --- the options ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("widths", "value"),
    [((0.0, 1.0), "0.0"), ((-0.5, 1.0), "-0.5"), ((0.5, 1.5), "1.5"), ((float("nan"), 1.0), "nan"),
     (("0.5", 1.0), "0.5"), ((True, 1.0), "True")],
)  # fmt: skip
@pytest.mark.parametrize("field", ["widths", "residual", "depths"])
def test_shares_outside_of_their_range(field: str, widths: tuple[Any, ...], value: str) -> None:
    assert_says(message_of(plain(), **{field: widths}), field, "(0, 1]", value)


@pytest.mark.parametrize("field", ["widths", "residual", "depths"])
def test_shares_whose_last_is_not_1(field: str) -> None:
    assert_says(message_of(plain(), **{field: (1.0, 0.5)}), f"{field}=(1.0, 0.5)", "last route", "must be 1")


@pytest.mark.parametrize("value", [(), 0.5, "0.5,1", {0.5, 1.0}])
@pytest.mark.parametrize("field", ["widths", "residual", "depths"])
def test_shares_that_are_no_list(field: str, value: object) -> None:
    assert_says(message_of(plain(), **{field: value}), field, "(0.25, 0.5, 1.0)")


@pytest.mark.parametrize("field", ["residual", "depths"])
def test_shares_for_another_number_of_routes(field: str) -> None:
    message = message_of(plain(), widths=(0.5, 1.0), **{field: (0.3, 0.5, 1.0)})
    assert_says(message, f"{field}=", "3 routes", "for 2", "one share for each route")
    message = message_of(plain(), **{field: (0.5, 1.0)})
    assert_says(message, f"{field}=", "2 routes", "for 4")


def test_an_unknown_option() -> None:
    message = message_of(plain(), width=(0.5, 1.0))
    assert_says(message, "no option width", "widths", "residual", "depths", "table", "gate")


@pytest.mark.parametrize("gate", ["blocks.9", "3.0", "fc", "", "BLOCKS.0"])
def test_an_unknown_place_of_the_gate(gate: str) -> None:
    message = message_of(ResidualNet().eval(), gate=gate)
    assert_says(message, gate, "possible: stem.0, blocks.0, blocks.1, blocks.2, blocks.3")


def test_a_gate_behind_the_last_block() -> None:
    message = message_of(ResidualNet().eval(), gate="blocks.4")
    assert_says(message, "blocks.4", "possible: stem.0, blocks.0")
    assert not message.endswith("blocks.4")


def test_a_gate_of_another_form() -> None:
    assert_says(message_of(plain(), gate_head="two"), "gate_head", "two", "onehot, scalar")


def test_a_table_with_an_unknown_group() -> None:
    message = message_of(plain(), table=({"conv": 4}, {}), gate="3")
    assert_says(message, "no channel group conv", "possible: 6, 9")


def test_a_table_with_too_wide_a_group() -> None:
    assert_says(
        message_of(plain(), table=({"6": 25}, {}), gate="3"), "6 has 24 channels", "25 is not possible"
    )


@pytest.mark.parametrize("width", [0, -1, 2.5, True, "8"])
def test_a_table_with_an_impossible_width(width: object) -> None:
    message = message_of(plain(), table=({"6": width}, {}), gate="3")
    assert_says(message, "6", "positive integer", repr(width))


@pytest.mark.parametrize("table", [({"6": 5}, {"6": 12}), ({"6": 24, "9": 8}, {"6": 12})])
def test_a_table_without_the_whole_network(table: tuple[dict[str, int], ...]) -> None:
    assert_says(message_of(plain(), table=table, gate="3"), "table", "largest route", "full widths")


@pytest.mark.parametrize(
    ("name", "reason"), [("0", "in front of the gate"), ("3", "crosses the gate"), ("13", "classes")]
)
def test_a_table_with_a_group_that_stays_whole(name: str, reason: str) -> None:
    message = message_of(plain(), table=({name: 2}, {}), gate="3")
    assert_says(message, f"table: {name} cannot be sliced", reason)


@pytest.mark.parametrize("table", [{}, {"6": 4}, (), [4], "6=4"])
def test_a_table_of_another_form(table: object) -> None:
    assert_says(message_of(plain(), table=table), "table", "one mapping for each route")


def test_a_table_for_another_number_of_routes() -> None:
    message = message_of(plain(), table=({"6": 4}, {}), widths=(0.3, 0.5, 1.0))
    assert_says(message, "table is for 2 routes", "3")


@pytest.mark.parametrize("name", list(SMALL_NETWORKS))
def test_options_are_checked_before_anything_runs(name: str) -> None:
    seen: list[object] = []
    network = randomise_module(SMALL_NETWORKS[name].build(1.0)).eval()
    network.register_forward_hook(lambda *_: seen.append(None))
    assert_says(message_of(network, random_images(1, dtype=torch.float32), widths=(2.0,)), "(0, 1]")
    assert not seen


def test_options_are_plain_data() -> None:
    options = ConvertOptions(widths=[0.5, 1], table=[{"a": 3}, {}])
    assert options.widths == (0.5, 1.0)
    assert options.table == ({"a": 3}, {})
    assert options.routes == 2
    assert ConvertOptions(widths=(0.5, 1.0)) == ConvertOptions(widths=[0.5, 1])


# --- networks of timm -------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["resnet19", "", "Resnet18", "no_such"])
def test_a_name_that_timm_does_not_have(name: str) -> None:
    need_timm()
    message = error_of(lambda: dsnet.create_model(f"timm:{name}"))
    assert_says(message, "timm has no network", name)
    if name == "resnet19":
        assert_says(message, "similar: ", "resnet18")


@pytest.mark.parametrize(
    "name", ["../resnet18", "resnet18/../x", "hf-hub:a/b", "local-dir:/tmp", "a\nb", "a*", "r?"]
)
def test_a_name_with_characters_of_paths(name: str) -> None:
    need_timm()
    message = error_of(lambda: dsnet.create_model(f"timm:{name}"))
    assert "timm has no network" in message
    assert "\n" not in message


@pytest.mark.parametrize("options", [{"widht": (0.5, 1.0)}, {"weights": "timm"}, {"pretrained": True}])
def test_an_unknown_option_of_a_network_of_timm(options: dict[str, object]) -> None:
    need_timm()
    message = error_of(lambda: dsnet.create_model("timm:resnet18", **options))
    assert_says(message, f"timm:resnet18 has no option {next(iter(options))}", "widths")


@pytest.mark.parametrize("size", [0, -1, 16.5, "32", True])
def test_an_impossible_image_size(size: object) -> None:
    need_timm()
    message = error_of(lambda: dsnet.create_model("timm:resnet18", image_size=size))
    assert_says(message, "image_size", str(size))


BATCHES = [torch.zeros(2, 3, 32, 32)]


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([], "batches are empty"),
        (BATCHES[0], "use [images]"),
        ([(BATCHES[0], torch.zeros(2))], "give the images without labels"),
        ([torch.zeros(2, 1, 32, 32)], "[2, 1, 32, 32]"),
        ([BATCHES[0].to(torch.uint8)], "torch.uint8"),
        ([torch.full((2, 3, 32, 32), torch.nan)], "NaN"),
    ],
)
def test_batches_to_sort_by_are_checked(batches: Any, words: str) -> None:  # noqa: ANN401
    network = plain_cnn().float().eval()
    assert words in error_of(lambda: dsnet.convert(network, torch.zeros(1, 3, 32, 32), batches=batches))


def test_batches_without_sorting_are_refused() -> None:
    network = plain_cnn().float().eval()
    example = torch.zeros(1, 3, 32, 32)
    assert "sort=False" in error_of(lambda: dsnet.convert(network, example, batches=BATCHES, sort=False))


def test_frozen_weights_stay_frozen_and_inference_mode_does_not_last() -> None:
    network = plain_cnn().float().eval()
    network[0].requires_grad_(False)
    with torch.inference_mode():
        model = dsnet.convert(network, torch.zeros(1, 3, 32, 32))
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert sum(p.numel() for p in frozen) == sum(p.numel() for p in network[0].parameters())
    model(torch.randn(2, 3, 32, 32), 0).sum().backward()
