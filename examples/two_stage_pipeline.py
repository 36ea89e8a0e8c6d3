"""A pipeline of two stages, with two batches in flight: `torchrun --nproc-per-node 2 examples/two_stage_pipeline.py`.

The first stage sends a batch and starts the next while the second stage computes. The tokens come back as an object.
"""

from collections import deque

import torch

from coordinator import (
    ParallelGroups,
    ParallelLayout,
    destroy_distributed_environment,
    init_distributed_environment,
)

BATCHES = 6
IN_FLIGHT = 2
HIDDEN = 64
VOCABULARY = 100


def main() -> None:
    """Run one stage."""
    init_distributed_environment(backend="gloo")
    with ParallelGroups.create(ParallelLayout(pipeline=2), backend="gloo") as groups:
        torch.manual_seed(groups.pp.rank_in_group)
        if groups.pp.is_first_rank:
            first_stage(groups)
        else:
            second_stage(groups)
    destroy_distributed_environment()


def first_stage(groups: ParallelGroups) -> None:
    """Embed the tokens of each batch and send the hidden states; collect the results in order."""
    embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
    waiting: deque[int] = deque()
    for batch in range(BATCHES):
        with torch.no_grad():
            hidden = embedding(torch.arange(batch, batch + 4))
        # The group keeps `hidden` until it is sent, also if it is dropped here; after `wait` it may be changed.
        for handle in groups.pp.isend_tensor_dict({"hidden_states": hidden, "batch": batch}):
            handle.wait()
        waiting.append(batch)
        if len(waiting) == IN_FLIGHT:
            collect(groups, waiting.popleft())
    while waiting:
        collect(groups, waiting.popleft())


def collect(groups: ParallelGroups, batch: int) -> None:
    """Receive the tokens of the oldest batch."""
    answer = groups.pp.recv_object(src=1)
    assert answer["batch"] == batch
    print(f"batch {batch}: tokens {answer['tokens']}")


def second_stage(groups: ParallelGroups) -> None:
    """Turn hidden states into tokens."""
    head = torch.nn.Linear(HIDDEN, VOCABULARY)
    for _ in range(BATCHES):
        received = groups.pp.recv_tensor_dict()
        assert received is not None
        with torch.no_grad():
            tokens = head(received["hidden_states"]).argmax(dim=-1).tolist()
        groups.pp.send_object({"batch": received["batch"], "tokens": tokens}, dst=0)


if __name__ == "__main__":
    main()
