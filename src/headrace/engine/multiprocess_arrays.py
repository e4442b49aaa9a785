"""Put values on meshes that may span several processes: every process handles its own devices, and no tensor moves.

JAX's `device_put` knows one process's devices. Where a mesh has devices of others, each process puts its part on its
own devices, and the parts are declared one array. Within one process all of these are `device_put`.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding


def place(tree: Any, where: Any) -> Any:
    """Put host arrays, whole in every process, on devices; `where` is one sharding or a tree of them."""
    if all(sharding.is_fully_addressable for sharding in jax.tree.leaves(where)):
        return jax.device_put(tree, where)
    if isinstance(where, NamedSharding):
        return jax.tree.map(lambda leaf: _place(leaf, where), tree)
    return jax.tree.map(_place, tree, where)


def place_share(tree: Any, where: Any) -> Any:
    """Put host arrays on devices, each process giving what its own devices hold of the dims that are cut."""
    if where.is_fully_addressable:
        return jax.device_put(tree, where)
    return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(where, leaf), tree)


def transfer(tree: Any, where: NamedSharding) -> Any:
    """Bring arrays to another mesh, replica by replica; whole ones to every device of it."""
    if where.is_fully_addressable:
        return jax.device_put(tree, where)
    return jax.tree.map(lambda leaf: _transfer(leaf, where), tree)


def gather_rows(tree: Any, where: NamedSharding) -> Any:
    """Put arrays whole on every device, each process giving as many of their rows, one behind the other."""
    firsts: dict[int, Any] = {}
    for device in _all_devices(where.mesh):
        firsts.setdefault(device.process_index, device)
    meeting = Mesh(np.array(list(firsts.values())), ("process",))
    rows = place_share(tree, NamedSharding(meeting, PartitionSpec("process")))
    return transfer(jax.tree.map(readable, rows), where)


def readable(array: jax.Array) -> jax.Array:
    """Return an array whole on every device where it is cut over devices of several processes; else as it is."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return array
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding), sharding
    return jax.device_put(array, NamedSharding(sharding.mesh, PartitionSpec(), memory_kind=sharding.memory_kind))


def local_part(tree: Any) -> Any:
    """Return what this process's devices hold of arrays that are cut over replicas along their first dim."""
    return jax.tree.map(_local_part, tree)


def _local_part(leaf: jax.Array) -> jax.Array:
    if leaf.is_fully_addressable:
        return leaf
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding), sharding
    mesh = Mesh(np.array(local_devices(sharding.mesh)), sharding.mesh.axis_names)
    parts = [shard.data for shard in leaf.addressable_shards]
    shape = (sum(part.shape[0] for part in parts), *leaf.shape[1:])
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, sharding.spec), parts)


def in_turn(tree: Any) -> Any:
    """Wait for values of CPUs of several processes; return them.

    XLA runs small CPU programs at once in the thread that launches them, past others that wait for their turn. So two
    programs that both exchange something, and of which none needs the other's results, may begin in another order in
    another process, and then wait for each other for ever. Accelerators keep the order of launches.
    """
    if is_spread_over_cpus(leaves := [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]):
        jax.block_until_ready(leaves)
    return tree


def is_spread_over_cpus(leaves: list[jax.Array]) -> bool:
    """Say whether arrays lie on CPUs of several processes."""
    return any(not a.is_fully_addressable and next(iter(a.sharding.device_set)).platform == "cpu" for a in leaves)


def spans_cpu_processes(mesh: Mesh) -> bool:
    """Say whether a mesh has CPUs of several processes."""
    devices = _all_devices(mesh)
    return devices[0].platform == "cpu" and len({device.process_index for device in devices}) > 1


def local_devices(mesh: Mesh | AbstractMesh) -> list[Any]:
    """Return the mesh's devices of this process, in the mesh's order."""
    return [device for device in _all_devices(mesh) if device.process_index == device.client.process_index()]


def _all_devices(mesh: Mesh | AbstractMesh) -> list[Any]:
    assert isinstance(mesh, Mesh), mesh
    return list(mesh.devices.flat)


def _parts_of(where: NamedSharding) -> list[SingleDeviceSharding]:
    """Return where the parts of this process lie, in the mesh's order, in the memory that the whole is to be in."""
    return [
        SingleDeviceSharding(device, memory_kind=where.memory_kind or device.default_memory().kind)
        for device in local_devices(where.mesh)
    ]


def _place(leaf: Any, where: NamedSharding) -> jax.Array:
    if isinstance(leaf, jax.Array):  # made on a device of this process
        assert where.is_fully_replicated, where
        copies = [jax.device_put(leaf, on) for on in _parts_of(where)]
        return jax.make_array_from_single_device_arrays(leaf.shape, where, copies)
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(whole.shape, where, lambda index: whole[index])


def _transfer(leaf: Any, where: NamedSharding) -> jax.Array:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return _place(np.asarray(leaf), where)
    if leaf.sharding == where:
        return leaf
    leaf = readable(leaf) if where.is_fully_replicated else leaf
    held = {shard.device: shard.data for shard in leaf.addressable_shards}
    sources = [held[device] for device in local_devices(leaf.sharding.mesh)]  # pyright: ignore[reportAttributeAccessIssue]
    targets = _parts_of(where)
    assert where.is_fully_replicated or len(sources) == len(targets), (leaf.sharding, where)
    parts = [jax.device_put(sources[n % len(sources)], on) for n, on in enumerate(targets)]
    return jax.make_array_from_single_device_arrays(leaf.shape, where, parts)
