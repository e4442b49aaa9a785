"""Convolution, normalisation, pooling and activations, in the form that is fast on each backend.

This is the only package in which the computation depends on the backend that a program is compiled for.
"""

from headrace.ops.activation import gelu, hard_sigmoid, hard_swish, mish, relu, relu6, sigmoid, swish
from headrace.ops.conv import conv2d, dense
from headrace.ops.native_inference import ConstantUnit, Gate, conv_bias, find_bottleneck, find_dense, find_gate
from headrace.ops.native_kernels import (
    PRODUCT,
    Shaped,
    Window,
    check_kernels,
    describe_missing_kernels,
    find_window,
    uses_kernels,
)
from headrace.ops.native_pool import find_max_pool
from headrace.ops.native_units import BatchNorm, can_fuse, conv_unit
from headrace.ops.normalization import (
    Groups,
    batch_norm_eval,
    batch_norm_train,
    find_norm_pool,
    fuses_norm_pools,
    group_norm,
    layer_norm,
)
from headrace.ops.pool import (
    Windows,
    average_pool,
    blur_pool,
    global_average_pool,
    materialised,
    max_pool,
    resize_by_average,
)
from headrace.ops.tracing import collecting, multiplying, using, weights_are_constant

__all__ = [
    "Groups",
    "average_pool",
    "batch_norm_eval",
    "batch_norm_train",
    "blur_pool",
    "collecting",
    "conv2d",
    "dense",
]
__all__ += ["gelu", "global_average_pool", "group_norm", "hard_sigmoid", "hard_swish", "layer_norm", "materialised"]
__all__ += ["max_pool", "mish", "relu", "relu6", "resize_by_average", "sigmoid", "swish", "using"]
__all__ += ["PRODUCT", "BatchNorm", "can_fuse", "check_kernels", "conv_unit", "find_window", "uses_kernels"]
__all__ += ["ConstantUnit", "Gate", "conv_bias", "find_bottleneck", "find_dense", "find_gate", "find_max_pool"]
__all__ += ["Shaped", "Window", "Windows", "describe_missing_kernels", "find_norm_pool", "fuses_norm_pools"]
__all__ += ["multiplying", "weights_are_constant"]
