"""Which networks the ragged kernels support: chains of layers that differ in their sizes alone.

The chain of a detector has links that leave the features as they are: "save" keeps them, "source" is a
pointwise layer that writes its output to the channels of an image's fused map, and "early source" does so
with features that were saved in front of the gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import nn

from dsnet.errors import DsnetError
from dsnet.gate import InferenceGate, SingleRouteInferenceGate, is_channel_attention
from dsnet.runtime.partition.feature_maps import Behind, Front, ToFused
from dsnet.runtime.partition.per_image_norm import ACTIVATIONS
from dsnet.runtime.partition.segments import ToGate, ToLogits

__all__ = ["MAX_KERNEL_SIZES", "PASS_THROUGH", "Link", "chain_of", "mismatch", "unsupported"]

MAX_KERNEL_SIZES = 3  # of a depthwise layer, over the routes

ALLOWED_BEFORE = {  # "": the layer may come first
    "stem": ("",),
    "pointwise": ("", "stem", "pointwise", "depthwise", "attention"),
    "depthwise": ("", "stem", "pointwise", "depthwise"),
    "attention": ("pointwise", "depthwise"),
    "gate": ("pointwise", "depthwise"),
    "single-route gate": ("pointwise", "depthwise"),
    "classifier": ("pointwise", "depthwise"),
}

LAST = ("gate", "single-route gate", "classifier", "source", "early source")
PASS_THROUGH = ("save", "source", "early source")


def unsupported(modules: Sequence[nn.Module]) -> str | None:
    """Return why modules cannot run as one ragged network, or None if they can."""
    try:
        return mismatch([chain_of(module) for module in modules])
    except DsnetError as error:
        return str(error)


Link = tuple[str, tuple[nn.Module, ...]]  # kind of layer, modules that it is made of


def chain_of(module: nn.Module) -> list[Link]:
    """Return a module as a list of layers that have a kernel; raise an error if one has none."""
    chain = _chain(module)
    kinds = [kind for kind, _ in chain if kind not in PASS_THROUGH]
    for before, kind in zip(["", *kinds], kinds, strict=False):
        if before not in ALLOWED_BEFORE[kind]:
            raise DsnetError(f"there is no kernel for {kind} behind {before or 'nothing'}")
    if not chain or chain[-1][0] not in LAST:
        raise DsnetError("a network must end at a gate, at a classifier, or with the features of a detector")
    return chain


def _chain(module: nn.Module) -> list[Link]:
    if isinstance(module, Front):
        chain = list[Link]()
        for number, block in enumerate(module.blocks):
            chain += [("save", ())] * (number in module.taps) + _links(_leaves(block))
        return chain + _links([module.gate])
    if isinstance(module, Behind) and isinstance(module.head, ToFused):
        sources = {}
        for stride, block in zip(module.wanted, module.head.projections.blocks, strict=True):
            ((_, modules),) = _links(_leaves(block))
            sources[stride] = (*modules, module.head)
        chain, done = [("early source", sources[stride]) for stride in module.handed if stride], 0
        for stride, tap in sorted(module.taps.items()):
            chain += _links([leaf for block in module.blocks[done:tap] for leaf in _leaves(block)])
            chain.append(("source", sources[stride]))
            done = tap
        return chain  # blocks behind the last source have no effect
    return _links(_leaves(module))


def _links(leaves: list[nn.Module]) -> list[Link]:
    chain = list[Link]()
    while leaves:
        head = leaves.pop(0)
        if isinstance(head, nn.Conv2d):
            act = leaves.pop(0) if leaves and type(leaves[0]) in ACTIVATIONS else nn.Identity()
            chain.append((_kind(head), (head, act)))
        elif is_channel_attention(head):
            chain.append(("attention", (head,)))
        elif isinstance(head, InferenceGate) and not leaves:
            chain.append(("gate", (head,)))
        elif isinstance(head, SingleRouteInferenceGate) and not leaves:
            chain.append(("single-route gate", ()))
        elif _classifies([head, *leaves]):
            chain.append(("classifier", (leaves.pop(),)))
            leaves.clear()
        else:
            raise DsnetError(f"there is no kernel for {type(head).__name__} there")
    return chain


def _classifies(leaves: Sequence[nn.Module]) -> bool:
    """Return whether modules are a mean over all positions and a linear layer."""
    if [type(leaf) for leaf in leaves] != [nn.AdaptiveAvgPool2d, nn.Flatten, nn.Linear]:
        return False
    pool, _, linear = leaves
    return cast(nn.AdaptiveAvgPool2d, pool).output_size in (1, (1, 1)) and linear.bias is not None


def _leaves(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, nn.Sequential):
        return [leaf for child in module for leaf in _leaves(child)]
    if isinstance(module, ToGate):
        return [*_leaves(module.body), module.gate]
    if isinstance(module, ToLogits):
        return [*_leaves(module.body), *_leaves(module.head)]
    return [module]


def _kind(conv: nn.Conv2d) -> str:
    (kernel, other), stride = conv.kernel_size, conv.stride
    plain = kernel == other and stride[0] == stride[1] and conv.dilation == (1, 1)
    plain &= conv.padding in [(around, around) for around in range(kernel)] and conv.padding_mode == "zeros"
    if plain and conv.bias is not None:
        if (kernel, stride, conv.groups) == (1, (1, 1), 1):
            return "pointwise"
        if conv.groups == conv.in_channels == conv.out_channels:
            return "depthwise"
        if conv.groups == 1 and conv.in_channels * kernel**2 <= 64 and conv.out_channels <= 128:
            return "stem"
    raise DsnetError(f"there is no kernel for {conv}")


def mismatch(chains: Sequence[Sequence[Link]]) -> str | None:
    """Return in what chains differ besides their sizes, or None if they do not."""
    kinds = {tuple(kind for kind, _ in chain) for chain in chains}
    if len(kinds) > 1:
        return "routes have layers of different kinds"
    if len(chains) > 1 and {"stem", "gate", "single-route gate"} & {kind for kind, _ in chains[0]}:
        return "routes have a stem or a gate of their own"
    first = [next((row[0] for kind, row in chain if kind not in PASS_THROUGH), None) for chain in chains]
    if len({conv.in_channels for conv in first if isinstance(conv, nn.Conv2d)}) > 1:
        return "the first layers of routes have different numbers of input channels"
    for links in zip(*chains, strict=True):
        convs = [row[0] for _, row in links if row and isinstance(row[0], nn.Conv2d)]
        if len({(conv.stride, type(row[1])) for conv, (_, row) in zip(convs, links, strict=False)}) > 1:
            return "routes have different strides or activations"
        if len({conv.kernel_size for conv in convs}) > MAX_KERNEL_SIZES:
            return f"routes have more than {MAX_KERNEL_SIZES} kernel sizes"
    return None
