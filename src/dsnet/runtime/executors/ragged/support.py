"""Which networks there are kernels for: chains of pointwise and depthwise layers, alike but for sizes.

Chains of detectors have links beside the others, which let features pass: at a "note" they are kept, a
"source" is a pointwise layer that writes what it makes of them to its channels of an image's fused map, and
so does a "noted" one with those that were kept in front of the gate.
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

__all__ = ["ASIDE", "KERNELS", "Link", "chain_of", "mismatch", "unsupported"]

KERNELS = 3  # sizes of depthwise kernels that routes may have


BEHIND = {  # what may stand in front of a layer; "": nothing
    "stem": ("",),
    "pointwise": ("", "stem", "pointwise", "depthwise", "attention"),
    "depthwise": ("", "stem", "pointwise", "depthwise"),
    "attention": ("pointwise", "depthwise"),
    "gate": ("pointwise", "depthwise"),
    "open": ("pointwise", "depthwise"),
    "classifier": ("pointwise", "depthwise"),
}

ENDS = ("gate", "open", "classifier", "source", "noted")  # open: a gate with one choice
ASIDE = ("note", "source", "noted")  # features are behind them what they are in front of them


def unsupported(modules: Sequence[nn.Module]) -> str | None:
    """Why these cannot be run as one, if they cannot."""
    try:
        return mismatch([chain_of(module) for module in modules])
    except DsnetError as error:
        return str(error)


Link = tuple[str, tuple[nn.Module, ...]]  # what it is, and of what it is made


def chain_of(module: nn.Module) -> list[Link]:
    """A module as a list of layers that there are kernels for."""
    chain = _chain(module)
    through = [kind for kind, _ in chain if kind not in ASIDE]
    for before, kind in zip(["", *through], through, strict=False):
        if before not in BEHIND[kind]:
            raise DsnetError(f"there is no kernel for {kind} behind {before or 'nothing'}")
    if not chain or chain[-1][0] not in ENDS:
        raise DsnetError("a network ends at a gate or at a classifier, or with a detector's features")
    return chain


def _chain(module: nn.Module) -> list[Link]:
    if isinstance(module, Front):
        chain = list[Link]()
        for number, block in enumerate(module.blocks):
            chain += [("note", ())] * (number in module.taps) + _links(_leaves(block))
        return chain + _links([module.gate])
    if isinstance(module, Behind) and isinstance(module.head, ToFused):
        sources = {}
        for stride, block in zip(module.wanted, module.head.projections.blocks, strict=True):
            ((_, parts),) = _links(_leaves(block))
            sources[stride] = (*parts, module.head)
        chain, done = [("noted", sources[stride]) for stride in module.handed if stride], 0
        for stride, tap in sorted(module.taps.items()):
            chain += _links([leaf for block in module.blocks[done:tap] for leaf in _leaves(block)])
            chain.append(("source", sources[stride]))
            done = tap
        return chain  # nobody reads what is behind the last of them
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
            chain.append(("open", ()))
        elif _classifies([head, *leaves]):
            chain.append(("classifier", (leaves.pop(),)))
            leaves.clear()
        else:
            raise DsnetError(f"there is no kernel for {type(head).__name__} there")
    return chain


def _classifies(leaves: Sequence[nn.Module]) -> bool:
    """Whether they are a mean over all positions and a linear layer."""
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
    """In what chains differ beside their sizes, if they do."""
    kinds = {tuple(kind for kind, _ in chain) for chain in chains}
    if len(kinds) > 1:
        return "routes have layers of different kinds"
    if len(chains) > 1 and {"stem", "gate", "open"} & {kind for kind, _ in chains[0]}:
        return "a stem or a gate is one of all routes"
    begins = [next((parts[0] for kind, parts in chain if kind not in ASIDE), None) for chain in chains]
    if len({conv.in_channels for conv in begins if isinstance(conv, nn.Conv2d)}) > 1:
        return "routes begin with other numbers of channels"
    for links in zip(*chains, strict=True):
        convs = [parts[0] for _, parts in links if parts and isinstance(parts[0], nn.Conv2d)]
        if len({(conv.stride, type(parts[1])) for conv, (_, parts) in zip(convs, links, strict=False)}) > 1:
            return "routes have other strides or activations"
        if len({conv.kernel_size for conv in convs}) > KERNELS:
            return f"routes have more than {KERNELS} sizes of kernels"
    return None
