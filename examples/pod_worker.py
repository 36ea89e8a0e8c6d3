"""The ranks of one pod of a LeaderWorkerSet: `python -m examples.pod_worker --processes 8`, see examples/kubernetes/.

Kubernetes starts one process in each pod. This one starts a rank for each device of the pod, and ends when one of them
fails, so that the pod fails and the controller starts the whole set again.
"""

import argparse
import multiprocessing
import multiprocessing.connection
import sys

import torch

from coordinator import (
    ParallelGroups,
    ParallelLayout,
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
)

INIT_METHOD = "lws://:29500"


def run_rank(local_rank: int, processes: int) -> None:
    """Join the other ranks of all pods, and add up a tensor with those of this pod and then with all."""
    # The controller tells the pod's index and the number of pods; which process of the pod this is, we say.
    init_distributed_environment(
        distributed_init_method=INIT_METHOD,
        local_rank=local_rank,
        local_world_size=processes,
        backend="gloo",
    )
    world = get_world_group()
    layout = ParallelLayout(tensor=processes, pipeline=world.world_size // processes)
    with ParallelGroups.create(layout, backend="gloo") as groups:
        pod = groups.tp.all_reduce(torch.ones(4))
        everyone = world.all_reduce(torch.ones(4))
        ranks = groups.tp.all_gather_object(world.rank)
    if local_rank == 0:
        print(
            f"pod of ranks {ranks}: sum {pod[0]:.0f} in the pod, {everyone[0]:.0f} in all pods",
            flush=True,
        )
    destroy_distributed_environment()


def main() -> int:
    """Start the ranks of this pod, and wait until they have ended or one has failed."""
    parser = argparse.ArgumentParser(description="Run the ranks of one pod of a LeaderWorkerSet.")
    parser.add_argument("--processes", type=int, required=True, help="ranks in this pod")
    processes = parser.parse_args().processes
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=run_rank, args=(number, processes)) for number in range(processes)]
    for rank in ranks:
        rank.start()
    running = list(ranks)
    while running:
        multiprocessing.connection.wait([rank.sentinel for rank in running])
        if any(rank.exitcode for rank in running):
            for rank in running:
                rank.kill()
            return 1
        running = [rank for rank in running if rank.exitcode is None]
    return 0


if __name__ == "__main__":
    sys.exit(main())
