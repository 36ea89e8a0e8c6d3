"""Errors survive the copies that engines make of them: Ray carries those of its actors to the driver."""

import copy

import pytest

from shm_broadcast.errors import (
    CapabilityError,
    CommError,
    CommTimeoutError,
    CudaError,
    DisagreementError,
    NcclError,
    PeerLostError,
    StaleGraphError,
    UsageError,
)


@pytest.mark.parametrize(
    "error",
    [
        UsageError("bad rank"),
        PeerLostError("lost rank 2", peers=[2]),
        CommTimeoutError("late", missing=[1, 3]),
        DisagreementError("differ", views={0: "a"}),
        CapabilityError("too old", requirement="Linux 5.3"),
        NcclError("refused", library="NCCL 2.27", function="ncclCommInitRank", code=5),
        CudaError("no device", library="CUDA", function="cuInit"),
        StaleGraphError(1, 2, group="tp:0"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_copy_is_equal(error: CommError) -> None:
    """Class, text, fields and notes are those of the first, by the way that copies between processes take too."""
    error.add_note("raised by rank 1")
    again = copy.copy(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.__dict__ == error.__dict__
