"""Convert trained networks of other origin, such as timm's, into supernets.

A network is traced (`_tracing`). Its channels are grouped, operation by operation (`_analysis`, `_rules`,
`_axes`). The graph is cut into a chain of blocks (`_chain`), and each block becomes a graph that runs with
slices of its weights (`_builder`, `_layers`, `_blocks`).
"""

from dsnet.models.convert.api import convert
from dsnet.models.convert.network import ConvertedNetwork
from dsnet.models.convert.options import ConvertOptions
from dsnet.models.convert.report import Conversion, GroupReport
from dsnet.models.convert.sources import load_pretrained, load_weights, register_network

__all__ = [
    "Conversion",
    "ConvertOptions",
    "ConvertedNetwork",
    "GroupReport",
    "convert",
    "load_pretrained",
    "load_weights",
    "register_network",
]
