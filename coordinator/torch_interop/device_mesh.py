"""Convert between torch's `DeviceMesh` and our groups: the layout of a mesh, and a mesh over existing groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch.distributed.device_mesh import DeviceMesh

from coordinator.group import GroupCoordinator
from coordinator.layout import Dimension, ParallelLayout
from shm_broadcast.errors import UsageError

# Dimensions in the order in which `ParallelLayout` numbers ranks, the slowest first.
_ORDER: Final[tuple[Dimension, ...]] = ("rdp", "sdp", "dp", "pp", "cp", "tp")
# torch's own examples use these names for the parts of data parallelism.
_ALIASES: Final[dict[str, Dimension]] = {"dp_replicate": "rdp", "dp_shard": "sdp"}


def layout_of_mesh(mesh: DeviceMesh) -> ParallelLayout:
    """Return the layout whose rank lists equal those of `mesh` in each of its dimensions.

    Raises:
        UsageError: No layout does: the mesh has unnamed or unknown dimensions, or another order of ranks.
    """
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(f"expected a torch DeviceMesh, not {type(mesh).__name__}")
    names: list[Dimension] = []
    for name in mesh.mesh_dim_names or ():
        dimension = next((each for each in _ORDER if each == _ALIASES.get(name, name)), None)
        if dimension is None:
            raise UsageError(
                f"the mesh has an unknown dimension {name!r}; use {', '.join(_ORDER)}, "
                f"or {', '.join(_ALIASES)} for the first two"
            )
        names.append(dimension)
    if not names:
        raise UsageError("the mesh's dimensions have no names; pass mesh_dim_names such as ('dp', 'tp')")
    if len(set(names)) != len(names) or ("dp" in names and not {"rdp", "sdp"}.isdisjoint(names)):
        raise UsageError(f"the mesh names a dimension twice: {mesh.mesh_dim_names}")
    sizes = dict(zip(names, mesh.mesh.shape, strict=True))
    shard = sizes.get("sdp", 1)
    layout = ParallelLayout(
        tensor=sizes.get("tp", 1),
        context=sizes.get("cp", 1),
        pipeline=sizes.get("pp", 1),
        data=sizes.get("dp", sizes.get("rdp", 1) * shard),
        shard=shard,
    )
    order = sorted(names, key=_ORDER.index)
    ranks = mesh.mesh.permute([names.index(name) for name in order]).flatten().tolist()
    if ranks != list(range(layout.world_size)):
        raise UsageError(
            f"the mesh {tuple(mesh.mesh_dim_names or ())} numbers its ranks {mesh.mesh.tolist()}; it must hold all "
            f"ranks of the world, ascending in the order {', '.join(order)}"
        )
    return layout


def mesh_of(layout: ParallelLayout, groups: Mapping[str, GroupCoordinator]) -> DeviceMesh:
    """Return a mesh over the process groups of `groups`, with the dimensions that have more than one rank.

    Of several independent replicas it holds the one of this rank: no group spans two of them, which a mesh would need.
    """
    is_hybrid = 1 < layout.shard < layout.data
    candidates = [name for name in _ORDER if name not in (("dp",) if is_hybrid else ("rdp", "sdp"))]
    names = [name for name in candidates if layout.size(name) > 1] or ["dp"]
    count = layout.world_size // layout.external_data
    first = groups["world"].rank // count * count
    ranks = torch.arange(first, first + count, dtype=torch.int).view([layout.size(name) for name in names])
    return DeviceMesh.from_group(
        [groups[name].device_group for name in names],
        groups["world"].device.type,
        mesh=ranks,
        mesh_dim_names=tuple(names),
    )
