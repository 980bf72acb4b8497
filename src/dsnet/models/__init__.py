"""The supernets of the paper, their reference networks, and the parts that families are built of.

A family is a subclass of `Supernet`, registered by `register_supernet`. It is built of blocks such as
`ConvNormAct`; blocks of a new kind derive from `Block`.
"""

from dsnet.counts import Shape
from dsnet.models.blocks import Block, Step, drop_branch, drop_features
from dsnet.models.conv_blocks import ChannelAttention, ConvNormAct, ConvSpec, MaxPool, SeparableBlock
from dsnet.models.group_by_route import Decide, GatedOutput, Routable, greedy, run_gated
from dsnet.models.heads import Head, PoolHead
from dsnet.models.input_spec import InputSpec
from dsnet.models.layout import norm_keys
from dsnet.models.mbnet_depth import DepthNet
from dsnet.models.mobilenet import MBNet
from dsnet.models.options import ConvOptions, GateOptions
from dsnet.models.reference_nets import DeiT, MobileNetV1, ResNet50
from dsnet.models.registry import create_model, initialise, list_models, register_reference, register_supernet
from dsnet.models.resnet import ResNet
from dsnet.models.supernet import BoundRoute, GateState, ModelSpec, Supernet
from dsnet.models.vit import ViT
from dsnet.slicing import Factory

__all__ = [
    "create_model",
    "initialise",
    "list_models",
    "register_supernet",
    "register_reference",
    "Block",
    "BoundRoute",
    "ChannelAttention",
    "ConvNormAct",
    "ConvOptions",
    "ConvSpec",
    "Factory",
    "GateOptions",
    "Head",
    "InputSpec",
    "MaxPool",
    "ModelSpec",
    "GateState",
    "PoolHead",
    "Routable",
    "SeparableBlock",
    "Shape",
    "Step",
    "Supernet",
    "drop_branch",
    "drop_features",
    "norm_keys",
    "Decide",
    "GatedOutput",
    "greedy",
    "run_gated",
    "MBNet",
    "ResNet",
    "ViT",
    "DepthNet",
    "DeiT",
    "MobileNetV1",
    "ResNet50",
]
