"""Each private name of JAX that Headrace uses, checked alone: after an upgrade of JAX these say which one is gone."""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.core import jax_private
from tests.fork_server import run

SRC = Path(jax_private.__file__).parents[1]

# One process is a job of its own here: it starts the coordination service and connects to it.
PROGRAM = """
import socket
import jax
from headrace.core.jax_private import coordination_client

assert coordination_client() is None
with socket.create_server(("127.0.0.1", 0)) as probe:
    port = probe.getsockname()[1]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=1, process_id=0)
process, num_processes, client = coordination_client()
assert (process, num_processes) == (0, 1)
client.key_value_set("a/b", "one")
client.key_value_set("a/c", "two")
assert client.blocking_key_value_get("a/b", 1000) == "one"
assert sorted(client.key_value_dir_get("a/")) == [("a/b", "one"), ("a/c", "two")]
client.key_value_delete("a/b")
assert client.key_value_dir_get("a/") == [("a/c", "two")]
try:
    client.blocking_key_value_get("a/b", 10)
except jax.errors.JaxRuntimeError as error:
    assert "DEADLINE_EXCEEDED" in str(error)
else:
    raise AssertionError("a missing key was found")
print("all there")
"""


def test_coordination_client() -> None:
    """jax._src.distributed.global_state, and the methods of its client."""
    found = run([sys.executable, "-c", PROGRAM], env={"PYTHONPATH": str(SRC.parent), "JAX_PLATFORMS": "cpu"})
    assert found.stdout == "all there\n", f"jax._src.distributed has changed:\n{found.stderr}"


def test_whether_devices_are_started() -> None:
    """jax._src.xla_bridge.backends_are_initialized."""
    jax.local_devices()
    assert jax_private.devices_are_started()
    program = "from headrace.core.jax_private import devices_are_started; print(devices_are_started())"
    environment = {"PYTHONPATH": str(SRC.parent), "JAX_PLATFORMS": "cpu"}
    done = run([sys.executable, "-c", program], env=environment, check=True)
    assert done.stdout == "False\n"


def test_arguments_of_a_vjp() -> None:
    """`args_res` of what jax.vjp returns: without it, arguments are copied between the passes."""
    x, w = jnp.arange(4.0), jnp.arange(1.0, 5.0)
    _, vjp = jax.vjp(lambda x, w: jnp.sum(x * x * w), x, w)
    expected = vjp(1.0)
    kept = len(jax.tree.leaves(vjp))
    dropped = jax_private.without_arguments(vjp)
    assert len(jax.tree.leaves(dropped)) < kept, "the result of jax.vjp has no args_res any more"
    for found, wanted in zip(jax_private.with_arguments(dropped, (x, w))(1.0), expected, strict=True):
        assert found.tolist() == wanted.tolist()


def test_an_equation_runs_on_values() -> None:
    closed = jax.make_jaxpr(lambda x: jax.nn.relu(jnp.sort(x)) * 2)(jnp.arange(3.0))
    values: dict[Any, Any] = {closed.jaxpr.invars[0]: jnp.array([3.0, -1.0, 2.0])}
    for each in closed.jaxpr.eqns:
        given = [each_read.val if hasattr(each_read, "val") else values[each_read] for each_read in each.invars]
        values.update(zip(each.outvars, jax_private.run_equation(each, given), strict=True))
    np.testing.assert_array_equal(values[closed.jaxpr.outvars[0]], [0, 4, 6])


@pytest.mark.parametrize("path", [path for path in SRC.rglob("*.py") if path.name != "jax_private.py"], ids=str)
def test_private_names_stand_in_one_file(path: Path) -> None:
    text = path.read_text()
    assert "jax._src" not in text
    assert "args_res" not in text
