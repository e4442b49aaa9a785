"""Convolutions for several backends at once: each gets its own form, all the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.ops.conv import conv2d, conv2d_plain
from headrace.ops.tracing import portable


@pytest.mark.parametrize(("groups", "inputs", "outputs"), [(1, 8, 4), (8, 8, 8), (2, 8, 4)])
def test_each_platform_has_its_form_and_the_numbers_agree(groups, inputs, outputs):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 9, 9, inputs)).astype(np.float32)
    w = rng.normal(size=(3, 3, inputs // groups, outputs)).astype(np.float32)
    shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)

    def function(x):
        return conv2d(x, jnp.asarray(w), 2, "SAME", groups)

    with portable():
        everywhere = jax.export.export(jax.jit(function), platforms=("cpu", "cuda", "tpu"))(shape)
        cuda = jax.export.export(jax.jit(function), platforms=("cuda",))(shape)
    assert f"feature_group_count = {groups} : i64" in cuda.mlir_module(), "one convolution, as XLA likes it there"
    expected = conv2d_plain(jnp.asarray(x), jnp.asarray(w), 2, ((1, 1), (1, 1)), groups)
    np.testing.assert_allclose(everywhere.call(x), expected, atol=1e-5)
