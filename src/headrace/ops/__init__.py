"""Convolution, normalisation, pooling and activations, in the form that is fast on each backend.

This is the only package that asks which backend a program is compiled for.
"""

from headrace.ops.activation import gelu, hard_sigmoid, hard_swish, relu, relu6, sigmoid, swish
from headrace.ops.conv import conv2d, dense
from headrace.ops.normalization import Groups, batch_norm_eval, batch_norm_train, group_norm
from headrace.ops.pool import global_average_pool, max_pool

__all__ = ["Groups", "batch_norm_eval", "batch_norm_train", "conv2d", "dense", "gelu", "global_average_pool"]
__all__ += ["group_norm", "hard_sigmoid", "hard_swish", "max_pool", "relu", "relu6", "sigmoid", "swish"]
