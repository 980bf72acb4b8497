"""The five networks once more, straight from the tables and a state dict: no module of the package runs.

Slices, windows, keys and gates are written out by hand here, so a mistake in the package's own slicing
code cannot hide in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

StateDict = dict[str, Tensor]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "hard_swish": F.hardswish,
}


def conv(sd: StateDict, name: str, x: Tensor, out: int, *, k: int, stride: int = 1, pad: int = 0) -> Tensor:
    weight = sd[f"{name}.conv.weight"]
    at = (weight.shape[2] - k) // 2
    return F.conv2d(x, weight[0:out, 0 : x.shape[1], at : at + k, at : at + k], None, stride, pad)


def depthwise(sd: StateDict, name: str, x: Tensor, *, k: int, stride: int, pad: int) -> Tensor:
    weight = sd[f"{name}.conv.weight"]
    at = (weight.shape[2] - k) // 2
    c = x.shape[1]
    return F.conv2d(x, weight[0:c, :, at : at + k, at : at + k], None, stride, pad, groups=c)


def batch_norm(sd: StateDict, name: str, x: Tensor, key: int) -> Tensor:
    c = x.shape[1]
    mean, var = sd[f"{name}.norm.mean"][key, 0:c], sd[f"{name}.norm.var"][key, 0:c]
    weight, bias = sd[f"{name}.norm.weight"][0:c], sd[f"{name}.norm.bias"][0:c]
    shape = (1, c, 1, 1)
    normal = (x - mean.view(shape)) / (var.view(shape) + 1e-5).sqrt()
    return normal * weight.view(shape) + bias.view(shape)


def linear(sd: StateDict, name: str, x: Tensor, out: int) -> Tensor:
    return x @ sd[f"{name}.weight"][0:out, 0 : x.shape[-1]].T + sd[f"{name}.bias"][0:out]


def attend(sd: StateDict, name: str, x: Tensor) -> Tensor:
    hidden = linear(sd, f"{name}.first", x.mean((2, 3)), sd[f"{name}.first.weight"].shape[0]).clamp(min=0)
    return x * (1 + torch.tanh(linear(sd, f"{name}.attention", hidden, x.shape[1])))[:, :, None, None]


def layer_norm(sd: StateDict, name: str, x: Tensor) -> Tensor:
    e = x.shape[-1]
    mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    return (x - mean) / (var + 1e-6).sqrt() * sd[f"{name}.weight"][0:e] + sd[f"{name}.bias"][0:e]


def pool_head(sd: StateDict, x: Tensor) -> Tensor:
    return linear(sd, "head.classifier", x.mean((2, 3)), sd["head.classifier.weight"].shape[0])


# --- DS-MBNet and DS-MBNet++ --------------------------------------------------------------------------
@dataclass
class MBNet:
    stem: tuple[int, int]
    early: list[tuple[int, int, int]]  # width, layers, stride
    dynamic: list[tuple[int, int]]  # layers, stride
    early_kernel: int
    inside: bool
    activation: str = "silu"

    def __call__(
        self, sd: StateDict, x: Tensor, route: int, widths: tuple[int, ...], k: int, p: int
    ) -> Tensor:
        width, stride = self.stem
        x = self.act(batch_norm(sd, "stem", conv(sd, "stem", x, width, k=3, stride=stride, pad=1), 0))
        block = 0
        for width, layers, stride in self.early:
            for layer in range(layers):
                s, pad = (stride if layer == 0 else 1), self.early_kernel // 2
                x = self.half(sd, block, x, self.early_kernel, s, pad, 0)
                x = attend(sd, f"blocks.{block}.attention.gate", x)
                x = self.mix(sd, block, x, width, 0)
                block += 1
        if not self.inside:
            x = attend(sd, "gates.0", x)
        for stage, (layers, stride) in enumerate(self.dynamic):
            for layer in range(layers):
                gated = self.inside and stage == 0 and layer == 0
                s, pad = (stride, p) if layer == 0 else (1, k // 2)
                x = self.half(sd, block, x, k, s, pad, 0 if gated else route)
                x = attend(sd, "gates.0" if gated else f"blocks.{block}.attention.gate", x)
                x = self.mix(sd, block, x, widths[stage], route)
                block += 1
        return pool_head(sd, x)

    def act(self, x: Tensor) -> Tensor:
        return ACTIVATIONS[self.activation](x)

    def half(self, sd: StateDict, block: int, x: Tensor, k: int, stride: int, pad: int, key: int) -> Tensor:
        name = f"blocks.{block}.depthwise"
        return self.act(batch_norm(sd, name, depthwise(sd, name, x, k=k, stride=stride, pad=pad), key))

    def mix(self, sd: StateDict, block: int, x: Tensor, width: int, key: int) -> Tensor:
        name = f"blocks.{block}.pointwise"
        return self.act(batch_norm(sd, name, conv(sd, name, x, width, k=1), key))


# --- DS-ResNet and DS-ResNet++ ------------------------------------------------------------------------
@dataclass
class ResNet:
    stem: tuple[int, int]
    pool: bool
    strides: list[int]
    several: bool  # one gate a stage

    def __call__(
        self,
        sd: StateDict,
        x: Tensor,
        keys: tuple[int, ...],
        widths: tuple[int, ...],
        depths: tuple[int, ...],
    ) -> Tensor:
        width, stride = self.stem
        x = F.relu(batch_norm(sd, "stem", conv(sd, "stem", x, width, k=3, stride=stride, pad=1), 0))
        if self.pool:
            x = F.max_pool2d(x, 3, 2, 1)
        for stage, stride in enumerate(self.strides):
            if self.several or stage == 0:
                x = attend(sd, f"gates.{stage}", x)
            for layer in range(depths[stage]):
                s = stride if layer == 0 else 1
                x = self.block(sd, f"stages.{stage}.{layer}", x, widths[stage], s, keys[stage], layer == 0)
        return pool_head(sd, x)

    @staticmethod
    def block(
        sd: StateDict, name: str, x: Tensor, width: int, stride: int, key: int, project: bool
    ) -> Tensor:
        def part(which: str, y: Tensor, out: int, k: int, s: int) -> Tensor:
            at = f"{name}.{which}"
            return batch_norm(sd, at, conv(sd, at, y, out, k=k, stride=s, pad=k // 2), key)

        y = F.relu(part("reduce", x, width // 4, 1, 1))
        y = F.relu(part("spatial", y, width // 4, 3, stride))
        y = part("expand", attend(sd, f"{name}.attention.gate", y), width, 1, 1)
        return F.relu(y + (part("shortcut", x, width, 1, stride) if project else x))


# --- DS-ViT++ -----------------------------------------------------------------------------------------
@dataclass
class ViT:
    stem: tuple[int, int, int]  # width, kernel, stride
    patch: int
    head_dim: int

    def __call__(self, sd: StateDict, x: Tensor, embed: int, heads: int, hidden: int, depth: int) -> Tensor:
        width, kernel, stride = self.stem
        x = conv(sd, "stem", x, width, k=kernel, stride=stride, pad=kernel // 2)
        x = F.silu(batch_norm(sd, "stem", x, 0))
        for i in range(2):
            for part, grouped in (("depthwise", True), ("pointwise", False)):
                name = f"stem_blocks.{i}.{part}"
                y = depthwise(sd, name, x, k=3, stride=1, pad=1) if grouped else conv(sd, name, x, width, k=1)
                x = F.silu(batch_norm(sd, name, y, 0))
        x = attend(sd, "gates.0", x)
        x = self.tokens(sd, x, embed)
        for i in range(depth):
            x = x + self.attention(sd, f"blocks.{i}.attention", layer_norm(sd, f"blocks.{i}.norm1", x), heads)
            y = F.gelu(linear(sd, f"blocks.{i}.mlp.fc1", layer_norm(sd, f"blocks.{i}.norm2", x), hidden))
            x = x + linear(sd, f"blocks.{i}.mlp.fc2", y, embed)
        logits = sd["head.classifier.weight"].shape[0]
        return linear(sd, "head.classifier", layer_norm(sd, "head.norm", x[:, 0]), logits)

    def tokens(self, sd: StateDict, x: Tensor, embed: int) -> Tensor:
        weight, bias = sd["embedding.tokens.proj.weight"][0:embed], sd["embedding.tokens.proj.bias"][0:embed]
        x = F.conv2d(x, weight, bias, self.patch)
        positions = sd["embedding.tokens.positions"][:, 0:embed]
        grid = math.isqrt(len(positions) - 1)
        rest = positions[1:].T.reshape(1, embed, grid, grid)
        if x.shape[2] != grid:
            rest = F.interpolate(rest, x.shape[2:], mode="bicubic", align_corners=False)
        x = (x + rest).flatten(2).transpose(1, 2)
        first = sd["embedding.tokens.class_token"][0:embed] + positions[0]
        return torch.cat([first.expand(len(x), 1, embed), x], 1)

    def attention(self, sd: StateDict, name: str, x: Tensor, heads: int) -> Tensor:
        d = self.head_dim
        q, k, v = (linear(sd, f"{name}.{part}", x, heads * d) for part in "qkv")
        outputs = []
        for h in range(heads):
            one = slice(h * d, (h + 1) * d)
            weights = torch.softmax(q[..., one] @ k[..., one].transpose(1, 2) / math.sqrt(d), -1)
            outputs.append(weights @ v[..., one])
        return linear(sd, f"{name}.proj", torch.cat(outputs, -1), x.shape[-1])


# --- the tables, typed once more -------------------------------------------------------------------------
MBNETS = {
    "": MBNet((16, 2), [(32, 1, 1), (48, 2, 2), (96, 2, 2)], [(6, 2), (2, 2)], 3, True),
    "_cifar": MBNet((16, 1), [(32, 1, 1), (48, 2, 1), (96, 2, 2)], [(6, 2), (2, 2)], 3, True),
    "_small": MBNet((16, 2), [(32, 1, 1), (64, 1, 2)], [(2, 2), (2, 2)], 3, True),
    "_tiny": MBNet((4, 1), [(8, 1, 2), (12, 1, 1)], [(2, 2), (1, 2)], 3, True),
}
RESNETS = {
    "": ResNet((64, 2), True, [1, 2, 2, 2], True),
    "_cifar": ResNet((64, 1), False, [1, 2, 2, 2], True),
    "_tiny": ResNet((16, 1), False, [1, 2], True),
}
VITS = {"": ViT((24, 7, 2), 8, 48), "_cifar": ViT((24, 3, 1), 4, 48), "_tiny": ViT((8, 3, 1), 4, 16)}

VIT_ROUTES = [
    (192, 4, 3, 12),
    (224, 5, 3, 12),
    (256, 5, 3.5, 13),
    (288, 6, 3.5, 13),
    (320, 6, 3.5, 13),
    (352, 7, 3.5, 13),
    (384, 7, 4, 14),
    (416, 8, 4, 14),
]
VIT_TINY_ROUTES = [(32, 2, 2, 2), (48, 3, 2, 2), (64, 4, 3, 3)]
RESNET_PLUS_LAYERS = ["2252", "2252", "2362", "2362", "3362", "3372", "3473", "3483", "3483"]


def run(
    name: str,
    sd: StateDict,
    x: Tensor,
    number: int,
    choices: tuple[int, ...],
    bn_key: str = "prefix",
    activation: str = "silu",  # of the MobileNets
) -> Tensor:
    """Logits of a model's route, computed here."""
    family, form = name, ""
    for suffix in ("_cifar", "_small", "_tiny"):
        if name.endswith(suffix):
            family, form = name.removesuffix(suffix), suffix
    tiny = form == "_tiny"
    if family in ("ds_mbnet", "ds_mbnet_plus"):
        net = replace(MBNETS[form], activation=activation)
        plus = family == "ds_mbnet_plus"
        if plus:
            net = replace(net, early_kernel=5, inside=False)
        if tiny:
            widths = ((8, 24, 48, 96)[number], (16, 48, 96, 192)[number])
            k, p = ((3, 0), (3, 1), (5, 2), (7, 3))[number] if plus else (3, 1)
        elif form == "_small":
            widths, (k, p) = (32 + 32 * number, 64 + 64 * number), (3, 1)
        elif plus:
            widths = (288 + 32 * number, 800 + 32 * number)
            k, p = ((3, 0), (3, 1), (5, 2), (5, 2), (7, 3), (7, 3))[number // 2]
        else:
            widths, (k, p) = (224 + 32 * number, 736 + 32 * number), (3, 1)
        return net(sd, x, number, widths, k, p)
    if family in ("ds_resnet", "ds_resnet_plus"):
        net = RESNETS[form]
        if family == "ds_resnet":
            full, depths = ((64, 128), (2, 2)) if tiny else ((256, 512, 1024, 2048), (3, 4, 6, 3))
            widths = tuple(c * (choice + 1) // 4 for c, choice in zip(full, choices, strict=True))
            keys = choices
            if bn_key == "prefix":
                keys = tuple(
                    sum(c * 4 ** (s - i) for i, c in enumerate(choices[: s + 1])) for s in range(len(choices))
                )
            return net(sd, x, keys, widths, depths)
        net = ResNet(net.stem, net.pool, net.strides, False)
        if tiny:
            width, depths = (32, 40, 48, 64)[number], ((1, 1), (1, 2), (2, 2), (2, 2))[number]
            widths = (width, 2 * width)
        else:
            width, depths = 128 + 16 * number, tuple(map(int, RESNET_PLUS_LAYERS[number]))
            widths = (width, 2 * width, 4 * width, 8 * width)
        return net(sd, x, (number,) * len(widths), widths, depths)
    embed, heads, ratio, depth = (VIT_TINY_ROUTES if tiny else VIT_ROUTES)[number]
    return VITS[form](sd, x, embed, heads, int(embed * ratio), depth)
