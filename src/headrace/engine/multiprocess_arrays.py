"""Put values on meshes that may span several processes: every process fills its local devices, and no tensor moves.

JAX's `device_put` handles the devices of one process. Where a mesh has devices of others, each process puts its part on
its local devices, and the parts are declared one array. Within one process all of these are `device_put`.
"""

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from headrace.core.tree import PyTree
from headrace.engine.devices import Device


def place(tree: PyTree, where: PyTree) -> PyTree:
    """Put host arrays, complete in every process, on devices; `where` is one sharding or a tree of them.

    Shapes in place of arrays are returned with their shardings, which is enough to compile with.
    """
    if _only_shapes(tree):
        return _placed_shapes(tree, where)
    if all(sharding.is_fully_addressable for sharding in jax.tree.leaves(where)):
        return jax.device_put(tree, where)
    if isinstance(where, NamedSharding):
        return jax.tree.map(lambda leaf: _place(leaf, where), tree)
    return jax.tree.map(_place, tree, where)


def place_share(tree: PyTree, where: NamedSharding) -> PyTree:
    """Put host arrays on devices; each process passes the part of the sharded dims that its local devices hold.

    Shapes in place of arrays, those of all processes together, are returned with their shardings.
    """
    if _only_shapes(tree):
        return _placed_shapes(tree, where)
    if where.is_fully_addressable:
        return jax.device_put(tree, where)
    return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(where, leaf), tree)


def shapes_of(tree: PyTree) -> PyTree:
    """Return shapes in place of arrays."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _only_shapes(tree: PyTree) -> bool:
    return all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def _placed_shapes(tree: PyTree, where: PyTree) -> PyTree:
    each = jax.tree.map(lambda _: where, tree) if isinstance(where, NamedSharding) else where
    return jax.tree.map(lambda leaf, on: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on), tree, each)


def transfer(tree: PyTree, where: NamedSharding) -> PyTree:
    """Copy arrays to another mesh, replica by replica; replicated ones to every device of it."""
    if where.is_fully_addressable:
        return jax.device_put(tree, where)
    return jax.tree.map(lambda leaf: _transfer(leaf, where), tree)


def gather_rows(tree: PyTree, where: NamedSharding) -> PyTree:
    """Replicate arrays on every device; each process passes the same number of their rows, in the processes' order."""
    # One device of each process takes its rows: divided among all local devices, their number would have to be a
    # multiple.
    firsts: dict[int, Device] = {}
    for device in _all_devices(where.mesh):
        firsts.setdefault(device.process_index, device)
    one_each = Mesh(np.array(list(firsts.values())), ("process",))
    rows = place_share(tree, NamedSharding(one_each, PartitionSpec("process")))
    return transfer(jax.tree.map(readable, rows), where)


def readable(array: jax.Array) -> jax.Array:
    """Replicate an array that is sharded over several processes, so that each can read it."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return array
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding), sharding
    # On the array's own mesh: with arrays that span processes, device_put only accepts a target with the same devices.
    return jax.device_put(array, NamedSharding(sharding.mesh, PartitionSpec(), memory_kind=sharding.memory_kind))


def local_part(tree: PyTree) -> PyTree:
    """Return what this process's devices hold of arrays that are cut over replicas along their first dim."""
    return jax.tree.map(_local_part, tree)


def _local_part(leaf: jax.Array) -> jax.Array:
    if leaf.is_fully_addressable:
        return leaf
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding), sharding
    # On a mesh of local devices the part is an array that this process can read as any other.
    mesh = Mesh(np.array(local_devices(sharding.mesh)), sharding.mesh.axis_names)
    parts = [shard.data for shard in leaf.addressable_shards]
    shape = (sum(part.shape[0] for part in parts), *leaf.shape[1:])
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, sharding.spec), parts)


def in_turn(tree: PyTree) -> PyTree:
    """Wait for values that are on several CPU devices, of one process or of several; return them.

    XLA runs small CPU programs immediately in the launching thread, ahead of others that are queued. Two programs with
    collectives that do not depend on each other may thus start in different orders on different devices, and wait for
    each other forever: a validation on four virtual devices of a machine with two cores did so beside the short calls
    of two stages x two replicas. Accelerators keep the order of launches.
    """
    if is_spread_over_cpus(leaves := [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]):
        jax.block_until_ready(leaves)
    return tree


def is_spread_over_cpus(leaves: list[jax.Array]) -> bool:
    """Say whether arrays are on several CPU devices."""
    return any(len(a.sharding.device_set) > 1 and next(iter(a.sharding.device_set)).platform == "cpu" for a in leaves)


def spans_cpus(mesh: Mesh) -> bool:
    """Say whether programs on a mesh run on several CPU devices, of one process or of several."""
    devices = _all_devices(mesh)
    return devices[0].platform == "cpu" and len(devices) > 1


def local_devices(mesh: Mesh | AbstractMesh) -> list[Device]:
    """Return the devices of the mesh that belong to this process, in the mesh's order."""
    return [device for device in _all_devices(mesh) if device.process_index == device.client.process_index()]


def _all_devices(mesh: Mesh | AbstractMesh) -> list[Device]:
    assert isinstance(mesh, Mesh), mesh
    return list(mesh.devices.flat)


def _parts_of(where: NamedSharding) -> list[SingleDeviceSharding]:
    """Return where this process's parts go, in the mesh's order and in the kind of memory that was asked for."""
    return [
        SingleDeviceSharding(device, memory_kind=where.memory_kind or device.default_memory().kind)
        for device in local_devices(where.mesh)
    ]


def _place(leaf: jax.typing.ArrayLike, where: NamedSharding) -> jax.Array:
    if isinstance(leaf, jax.Array):  # made on a device of this process
        assert where.is_fully_replicated, where
        # From device to device, without a detour through host memory.
        copies = [jax.device_put(leaf, on) for on in _parts_of(where)]
        return jax.make_array_from_single_device_arrays(leaf.shape, where, copies)
    whole = np.asarray(leaf)
    # Every process has the whole array and slices it for its own devices: nothing crosses the network.
    return jax.make_array_from_callback(whole.shape, where, lambda index: whole[index])


def _transfer(leaf: jax.typing.ArrayLike, where: NamedSharding) -> jax.Array:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return _place(np.asarray(leaf), where)
    if leaf.sharding == where:
        return leaf
    leaf = readable(leaf) if where.is_fully_replicated else leaf
    # Shard by shard: device_put refuses to move arrays between meshes that span processes. A process owns whole
    # replicas, so the source of each of its parts is here.
    held = {shard.device: shard.data for shard in leaf.addressable_shards}
    sources = [held[device] for device in local_devices(leaf.sharding.mesh)]  # pyright: ignore[reportAttributeAccessIssue]
    targets = _parts_of(where)
    assert where.is_fully_replicated or len(sources) == len(targets), (leaf.sharding, where)
    parts = [jax.device_put(sources[n % len(sources)], on) for n, on in enumerate(targets)]
    return jax.make_array_from_single_device_arrays(leaf.shape, where, parts)
