"""SE(3)-Hyena, vector self-attention, and what they and host layers are made of: networks on tokens by grade, the shell
that brings users' tokens to them, and their options."""

from .clifford import CliffordBlock, CliffordLinear, GradedMLP
from .clifford_mlp import CliffordMLP
from .graded_model import GradedModel
from .graded_network import GradedNetwork
from .graded_operators import GradedOperator, HyenaOperator, VectorAttentionOperator
from .grades import Grades, grades_of_channels, join_channels
from .local_context import Edges, LocalContext
from .options import ConvolutionOptions, HyenaOptions, OperatorOptions, check_short_conv
from .scalar_vector_module import ScalarVectorModule
from .se3_hyena import SE3Hyena, SE3HyenaOperator
from .sequence_filters import LagFilter, ShortConv
from .shell import TokenShell
from .vector_self_attention import VectorSelfAttention, VectorTransformer

__all__ = [
    "CliffordBlock",
    "CliffordLinear",
    "CliffordMLP",
    "ConvolutionOptions",
    "Edges",
    "GradedMLP",
    "GradedModel",
    "GradedNetwork",
    "GradedOperator",
    "Grades",
    "HyenaOperator",
    "HyenaOptions",
    "LagFilter",
    "LocalContext",
    "OperatorOptions",
    "SE3Hyena",
    "SE3HyenaOperator",
    "ScalarVectorModule",
    "ShortConv",
    "TokenShell",
    "VectorAttentionOperator",
    "VectorSelfAttention",
    "VectorTransformer",
    "check_short_conv",
    "grades_of_channels",
    "join_channels",
]
