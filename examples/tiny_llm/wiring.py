"""Create and destroy the demo's groups. No other module does."""

from collections.abc import Iterator
from contextlib import contextmanager

from coordinator import (
    ParallelGroups,
    ParallelLayout,
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
)

from .group import ModelGroups
from .options import Options

__all__ = ["join_groups"]

CPU_BACKEND = "gloo"  # even if there is a GPU: the demo computes on the CPU


@contextmanager
def join_groups(options: Options) -> Iterator[tuple[ModelGroups, ModelGroups]]:
    """Join the other ranks, create the groups, and destroy them at the end. Collective over all ranks.

    Args:
        options: Equal on all ranks, except for the rank itself.

    Yields:
        The groups of the parallel model, and groups of this rank only.

    Raises:
        DemoError: The options need another number of ranks.
    """
    if options.launched is None:
        method = options.init_method or "env://"  # torchrun has set the environment
        init_distributed_environment(distributed_init_method=method, backend=CPU_BACKEND)
    else:
        init_distributed_environment(
            world_size=options.world_size,
            rank=options.launched.rank,
            distributed_init_method=f"file://{options.launched.directory / 'rendezvous'}",
            backend=CPU_BACKEND,
        )
    try:
        options.check_world_size(get_world_group().world_size)
        layout = ParallelLayout(tensor=options.tensor, pipeline=options.pipeline)
        with ParallelGroups.create(
            layout, backend=CPU_BACKEND, use_message_queue_broadcaster=False, world=get_world_group()
        ) as groups:
            alone = groups.dp  # with one replica this group has one member
            yield ModelGroups(groups.world, groups.tp, groups.pp), ModelGroups(alone, alone, alone)
    finally:
        destroy_distributed_environment()
