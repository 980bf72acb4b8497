"""The supernets of the paper, their reference networks, and the registry of models by name."""

from dsnet.models.blocks import Block, Factory, Step
from dsnet.models.group_by_route import Decide, GatedOutput, greedy, run_gated
from dsnet.models.input_spec import InputSpec
from dsnet.models.mbnet_depth import DepthNet
from dsnet.models.mobilenet import MBNet
from dsnet.models.reference_nets import DeiT, MobileNetV1, ResNet50
from dsnet.models.registry import create_model, initialise, list_models, register_reference, register_supernet
from dsnet.models.resnet import ResNet
from dsnet.models.supernet import BoundRoute, GateState, ModelSpec, Supernet
from dsnet.models.vit import ViT

__all__ = [
    "create_model",
    "initialise",
    "list_models",
    "register_supernet",
    "register_reference",
    "Block",
    "BoundRoute",
    "Factory",
    "InputSpec",
    "ModelSpec",
    "GateState",
    "Step",
    "Supernet",
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
