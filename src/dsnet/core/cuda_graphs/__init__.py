"""Capture and replay of CUDA graphs."""

from dsnet.core.cuda_graphs.capture import CapturedGraph, capture
from dsnet.core.cuda_graphs.function import GraphedFunction
from dsnet.core.cuda_graphs.streams import StreamPool, captured_call, stream_pool
from dsnet.core.cuda_graphs.training import CapturedPass, TrainingGraphs, TrainingPass

__all__ = [
    "CapturedGraph",
    "CapturedPass",
    "GraphedFunction",
    "StreamPool",
    "TrainingGraphs",
    "TrainingPass",
    "capture",
    "captured_call",
    "stream_pool",
]
