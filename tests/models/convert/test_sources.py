"""Weights of files for networks of timm, and checkpoints of converted networks."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import dsnet
from dsnet.core.checkpoint import load_checkpoint
from dsnet.models.convert.options import ConvertOptions
from dsnet.models.convert.sources import (
    build_converted,
    import_timm,
    load_pretrained,
    load_weights,
    pretrained_channels,
    timm_network,
)
from dsnet.models.loading import load_model, save_checkpoint
from dsnet.slicing import Factory
from tests.support import assert_close, error_of, need_timm, rewrite
from tests.support.small_networks import plain_cnn, random_images, randomise_module

State = dict[str, Tensor]
TIMM = "timm:resnet18"
OPTIONS: dict[str, Any] = {"widths": (0.5, 1.0), "image_size": 32, "num_classes": 7}


@pytest.fixture
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a test reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def network(seed: int = 0, classes: int = 5) -> nn.Module:
    model = plain_cnn()
    model[13] = nn.Linear(16, classes)
    return randomise_module(model, seed).eval()


def save_safetensors(path: Path, state: State) -> Path:
    save_file(state, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


def save_torch(path: Path, state: State) -> Path:
    torch.save(state, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def save_in_a_mapping(path: Path, state: State) -> Path:
    given = {f"module.{name}": tensor for name, tensor in state.items()}
    torch.save({"state_dict": given, "epoch": 3}, path.with_suffix(".pth"))
    return path.with_suffix(".pth")


SAVE: dict[str, Callable[[Path, State], Path]] = {
    "safetensors": save_safetensors,
    "torch": save_torch,
    "mapping": save_in_a_mapping,
}


def state_of(model: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def renamed(state: State) -> State:
    return {f"other.{number:03}": tensor for number, tensor in enumerate(state.values())}


def assert_equal(one: nn.Module, other: nn.Module, *, without: str = " ") -> None:
    theirs = other.state_dict()
    for name, tensor in one.state_dict().items():
        if tensor.is_floating_point() and not name.startswith(without):
            assert torch.equal(tensor, theirs[name]), name


# --- weights of a file ------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", SAVE)
def test_weights_by_name(tmp_path: Path, kind: str) -> None:
    given, taken = network(seed=1), network(seed=2)
    shuffled = dict(reversed(state_of(given).items()))
    load_weights(taken, SAVE[kind](tmp_path / "weights", shuffled))
    assert_equal(taken, given)
    x = random_images(2, dtype=torch.float32)
    assert torch.equal(taken(x), given(x))


@pytest.mark.parametrize("kind", ["torch", "mapping"])  # safetensors sorts by name
def test_weights_by_order(tmp_path: Path, kind: str) -> None:
    given, taken = network(seed=1), network(seed=2)
    path = SAVE[kind](tmp_path / "weights", renamed(state_of(given)))
    load_weights(taken, path, by_order=True)
    assert_equal(taken, given)


def test_a_safetensors_file_by_order(tmp_path: Path) -> None:
    given, taken = network(seed=1), network(seed=2)
    path = save_safetensors(tmp_path / "weights", renamed(state_of(given)))
    load_weights(taken, path, by_order=True)
    assert_equal(taken, given)


@pytest.mark.parametrize("by_order", [False, True])
def test_a_classifier_for_other_classes_is_skipped(tmp_path: Path, by_order: bool) -> None:
    given, taken = network(seed=1), network(seed=2, classes=9)
    before = state_of(taken)
    state = state_of(given)
    path = save_torch(tmp_path / "weights", renamed(state) if by_order else state)
    load_weights(taken, path, by_order=by_order)
    assert_equal(taken, given, without="13.")
    assert torch.equal(taken[13].weight, before["13.weight"])
    assert torch.equal(taken[13].bias, before["13.bias"])


def test_names_that_do_not_fit_hint_at_loading_by_order(tmp_path: Path) -> None:
    path = save_torch(tmp_path / "weights", renamed(state_of(network())))
    message = error_of(lambda: load_weights(network(), path))
    for part in (str(path), "lacks 21 tensors", "0.weight", "21 unknown", "other.000", "--weights-by-order"):
        assert part in message


def test_there_is_no_hint_where_shapes_differ(tmp_path: Path) -> None:
    state = state_of(network())
    del state["0.weight"]
    message = error_of(lambda: load_weights(network(), save_torch(tmp_path / "weights", state)))
    assert "lacks 1 tensors" in message
    assert "0.weight" in message
    assert "--weights-by-order" not in message


def test_a_tensor_of_another_shape(tmp_path: Path) -> None:
    state = state_of(network())
    state["6.weight"] = torch.zeros(24, 12, 5, 5)
    taken = network(seed=2)
    before = state_of(taken)
    message = error_of(lambda: load_weights(taken, save_torch(tmp_path / "weights", state)))
    for part in ("6.weight", "[24, 12, 5, 5]", "expected [24, 12, 3, 3]"):
        assert part in message
    assert all(torch.equal(tensor, before[name]) for name, tensor in taken.state_dict().items())


def test_a_wrong_order(tmp_path: Path) -> None:
    state = dict(reversed(state_of(network()).items()))
    message = error_of(lambda: load_weights(network(), save_torch(tmp_path / "w", state), by_order=True))
    for part in ("in order", "tensor 0 is 13.bias [5]", "0.weight [8, 3, 3, 3]"):
        assert part in message


def test_another_number_of_tensors(tmp_path: Path) -> None:
    state = state_of(network())
    del state["13.bias"]
    message = error_of(lambda: load_weights(network(), save_torch(tmp_path / "w", state), by_order=True))
    assert "has 20 tensors, the network 21" in message


@pytest.mark.parametrize("by_order", [False, True])
def test_a_classifier_whose_features_differ_is_refused(tmp_path: Path, by_order: bool) -> None:
    state = state_of(network())
    state["13.weight"] = torch.zeros(5, 17)
    message = error_of(lambda: load_weights(network(), save_torch(tmp_path / "w", state), by_order=by_order))
    assert "[5, 17]" in message
    assert "[5, 16]" in message


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return _write, (str(self.path),)


def _write(path: str) -> None:
    Path(path).write_text("code of a file was run")


@pytest.mark.parametrize("inside", ["whole", "entry"])
def test_nothing_but_tensors_is_unpickled(tmp_path: Path, inside: str) -> None:
    trace = tmp_path / "trace"
    content: Any = Harmful(trace)
    if inside == "entry":
        content = {**state_of(network()), "extra": content}
    torch.save(content, tmp_path / "weights.pt")
    message = error_of(lambda: load_weights(network(), tmp_path / "weights.pt"))
    assert "cannot be read as weights" in message
    assert "safetensors" in message
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(content))
    assert "cannot be read" in error_of(lambda: load_weights(network(), tmp_path / "plain.pt"))
    assert not trace.exists()


@pytest.mark.parametrize("content", [[torch.zeros(2)], {"a": 3}, torch.zeros(3)])
def test_a_file_without_a_state_dict(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "weights.pt")
    message = error_of(lambda: load_weights(network(), tmp_path / "weights.pt"))
    assert "weights.pt holds no state dict" in message


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_a_damaged_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"no weights")
    message = error_of(lambda: load_weights(network(), path))
    assert f"{path} cannot be read as weights" in message
    assert "possible: a safetensors file" in message


def test_a_file_that_does_not_exist(tmp_path: Path) -> None:
    assert f"there is no file {tmp_path / 'no.pt'}" in error_of(
        lambda: load_weights(network(), tmp_path / "no.pt")
    )
    assert "there is no file" in error_of(lambda: load_weights(network(), tmp_path))


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    state = state_of(network())
    state["6.weight"][0, 0] = float("nan")
    message = error_of(lambda: load_weights(network(), save_torch(tmp_path / "w", state)))
    assert "finite" in message


# --- networks of timm -------------------------------------------------------------------------------------
@pytest.mark.usefixtures("_no_network")
class TestTimm:
    def test_equal_generators_give_equal_networks(self) -> None:
        need_timm()
        models = [
            dsnet.create_model(TIMM, generator=torch.Generator().manual_seed(seed), **OPTIONS)
            for seed in (0, 0, 1)
        ]
        states = [model.state_dict() for model in models]
        assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
        for name, tensor in states[0].items():
            if name.endswith("weight") and tensor.ndim > 1:
                assert not torch.equal(tensor, states[2][name]), name
                assert tensor.std() > 0, name

    def test_equal_global_seeds_give_equal_networks(self) -> None:
        need_timm()
        states = []
        for _ in range(2):
            torch.manual_seed(3)
            states.append(dsnet.create_model(TIMM, **OPTIONS).state_dict())
        assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())

    def test_options_and_precision(self) -> None:
        need_timm()
        model = dsnet.create_model(TIMM, dtype=torch.float64, **OPTIONS)
        assert model.name == TIMM
        assert model.spec.options == tuple(sorted(OPTIONS.items()))
        assert model.space.name == TIMM
        assert model.input_spec.image_size == 32
        assert {p.dtype for p in model.parameters()} == {torch.float64}
        assert not model.training
        assert model(random_images(2, 32)).shape == (2, 7)

    def test_the_meta_device_counts_the_same(self) -> None:
        need_timm()
        meta = dsnet.create_model(TIMM, device="meta", **OPTIONS)
        model = dsnet.create_model(TIMM, **OPTIONS)
        assert {p.device.type for p in meta.parameters()} == {"meta"}
        assert meta.space == model.space
        assert [dsnet.cost(meta, r) for r in meta.space] == [dsnet.cost(model, r) for r in model.space]

    def test_a_checkpoint_gives_the_same_network(self, tmp_path: Path) -> None:
        need_timm()
        model = randomise_module(dsnet.create_model(TIMM, **OPTIONS), seed=4)
        save_checkpoint(tmp_path, "last", model, step=3)
        loaded = load_model(tmp_path)
        assert loaded.spec == model.spec
        assert loaded.space == model.space
        x = random_images(3, 32, dtype=torch.float32)
        for route in model.space:
            assert torch.equal(loaded(x, route), model(x, route))
        assert torch.equal(loaded(x), model(x))
        assert load_checkpoint(tmp_path).data["network"]["name"] == TIMM

    def test_a_checkpoint_of_other_routes_is_refused(self, tmp_path: Path) -> None:
        need_timm()
        model = dsnet.create_model(TIMM, **OPTIONS)
        folder = save_checkpoint(tmp_path, "last", model, step=3)
        files = [file for file in folder.glob("*.json") if '"widths"' in file.read_text()]
        assert len(files) == 1
        rewrite(files[0], files[0].read_text().replace("0.5", "0.25"))
        assert "other routes" in error_of(lambda: load_model(tmp_path))

    @pytest.mark.parametrize("by_order", [False, True])
    def test_pretrained_weights_of_a_file(self, tmp_path: Path, by_order: bool) -> None:
        need_timm()
        original = randomise_module(timm_network("resnet18", num_classes=7), seed=6).eval()
        state = {k: v for k, v in state_of(original).items() if v.is_floating_point()}
        path = save_torch(tmp_path / "weights", renamed(state) if by_order else state)
        model = load_pretrained(TIMM, path, by_order=by_order, **OPTIONS)
        x = random_images(2, 32, dtype=torch.float32)
        assert_close(model(x, model.space.largest), original(x), 1e-5)
        assert model.spec.name == TIMM
        assert dict(model.spec.options) == OPTIONS

    def test_a_new_classifier_is_drawn_by_the_seed(self, tmp_path: Path) -> None:
        need_timm()
        original = randomise_module(timm_network("resnet18", num_classes=4), seed=6)
        path = save_torch(tmp_path / "weights", state_of(original))
        heads = [load_pretrained(TIMM, path, seed=seed, **OPTIONS).head.classifier for seed in (0, 0, 1)]
        assert heads[0].weight.shape[0] == 7
        assert torch.equal(heads[0].weight, heads[1].weight)
        assert not torch.equal(heads[0].weight, heads[2].weight)

    def test_weights_of_another_network(self, tmp_path: Path) -> None:
        need_timm()
        path = save_torch(tmp_path / "weights", state_of(network()))
        for by_order in (False, True):
            message = error_of(
                lambda by_order=by_order: build_converted(
                    TIMM, ConvertOptions(), Factory(), weights=path, by_order=by_order
                )
            )
            assert str(path) in message
            assert "tensors" in message

    def test_the_original_normalisation(self) -> None:
        need_timm()
        assert pretrained_channels(TIMM) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        assert pretrained_channels("timm:vit_tiny_patch16_224") == ((0.5,) * 3, (0.5,) * 3)

    def test_a_download_that_fails_is_an_error_that_names_the_way_out(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        need_timm()

        def fail(name: str, **options: object) -> None:
            assert options["pretrained"]
            raise OSError("no connection")

        monkeypatch.setattr(import_timm(), "create_model", fail)
        message = error_of(lambda: load_pretrained(TIMM, "timm", **OPTIONS))
        assert "cannot create resnet18" in message
        assert "--weights FILE" in message
