"""The double-headed gate: channel attention and a routing decision on shared features (section 3.5).

An average pool and one shared layer encode the features. On this encoding sit the attention head, which
scales each channel by 1 + tanh, and optionally a routing head, which scores the choices of the gate. The
attention belongs to the supernet's weights, the routing head to the router: a pass at a given route does not
run it. A gate with a routing head computes in float32 or better, whatever the precision around it.
"""

from dsnet.gate.inference import (
    InferenceGate,
    RoutingInferenceGate,
    SingleRouteInferenceGate,
    is_channel_attention,
    scalar_scores,
)
from dsnet.gate.trainable import (
    Gate,
    GateEncoding,
    HeadForm,
    RoutingGate,
    RoutingHead,
    SingleRouteGate,
    attention_width,
)

__all__ = [
    "Gate",
    "GateEncoding",
    "HeadForm",
    "InferenceGate",
    "RoutingGate",
    "RoutingHead",
    "RoutingInferenceGate",
    "SingleRouteGate",
    "SingleRouteInferenceGate",
    "attention_width",
    "is_channel_attention",
    "scalar_scores",
]
