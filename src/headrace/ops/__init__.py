"""Convolution, normalisation, pooling and activations, in the form that is fast on each backend.

This is the only package that asks which backend a program is compiled for.
"""

from headrace.ops.activation import (
    gelu as gelu,
)
from headrace.ops.activation import (
    hard_sigmoid as hard_sigmoid,
)
from headrace.ops.activation import (
    hard_swish as hard_swish,
)
from headrace.ops.activation import (
    relu as relu,
)
from headrace.ops.activation import (
    relu6 as relu6,
)
from headrace.ops.activation import (
    sigmoid as sigmoid,
)
from headrace.ops.activation import (
    swish as swish,
)
from headrace.ops.conv import conv2d as conv2d
from headrace.ops.conv import dense as dense
from headrace.ops.normalization import (
    Groups as Groups,
)
from headrace.ops.normalization import (
    batch_norm_eval as batch_norm_eval,
)
from headrace.ops.normalization import (
    batch_norm_train as batch_norm_train,
)
from headrace.ops.normalization import (
    group_norm as group_norm,
)
from headrace.ops.pool import global_average_pool as global_average_pool
from headrace.ops.pool import max_pool as max_pool
