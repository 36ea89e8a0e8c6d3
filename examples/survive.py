"""Three replicas add up; one is killed in the middle, and the others go on: `python -m examples.survive`."""

import os
import signal
import subprocess
import sys
import tempfile

import torch

from coordinator import (
    CommTimeoutError,
    GroupBrokenError,
    ParallelGroups,
    PeerLostError,
    init_distributed_environment,
)

REPLICAS, STEPS = 3, 5
VICTIM, LAST_STEP = 1, 2


def say(line: str) -> None:
    """Print a line at once and as a whole: several processes write to one output."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def serve(number: int, directory: str) -> None:
    """Be one replica."""
    init_distributed_environment(REPLICAS, number, f"file://{directory}", backend="gloo", elastic=True)
    groups = ParallelGroups.from_sizes(tensor_parallel_size=1)
    step = 0
    while step < STEPS:
        try:
            if number == VICTIM and step == LAST_STEP:
                os.kill(os.getpid(), signal.SIGKILL)
            total = groups.dp.all_reduce(torch.tensor([1.0])).item()
        except (PeerLostError, CommTimeoutError, GroupBrokenError) as error:
            say(f"process {number}: {error}")
            groups = groups.rebuild(progress=step)
            say(f"process {number}: {groups.change}")
            assert groups.change is not None
            # A rank may have finished a step that another one has not.
            step = min(groups.change.progress)
        else:
            step += 1
            say(f"process {number} is rank {groups.dp.rank_in_group}: step {step}, {total:.0f} replicas")
    groups.destroy()


def main() -> int:
    """Start the replicas; return 0 if the right ones have come to the end."""
    with tempfile.TemporaryDirectory() as directory:
        commands = [
            [sys.executable, "-m", "examples.survive", str(each), directory] for each in range(REPLICAS)
        ]
        processes = [subprocess.Popen(command) for command in commands]  # noqa: S603
        ends = [process.wait() for process in processes]
    expected = [-signal.SIGKILL if number == VICTIM else 0 for number in range(REPLICAS)]
    return 0 if ends == expected else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(int(sys.argv[1]), sys.argv[2])
    else:
        sys.exit(main())
