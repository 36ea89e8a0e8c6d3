"""Tools for tests: groups without other ranks, and the conformance suite for your own communicator.

    from coordinator.testing import FakeGroupCoordinator, check_device_communicator

`FakeGroupCoordinator` replaces a group in code that runs in one process. `fake_groups` returns one rank's
`ParallelGroups`, all of them fakes. `check_device_communicator` runs on every rank of a real group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from coordinator.testing import conformance_exchanges as exchanges
from coordinator.testing import conformance_moves as moves
from coordinator.testing import conformance_outputs as outputs
from coordinator.testing import conformance_reductions as reductions
from coordinator.testing.conformance import Checker, ConformanceError, ObjectExchange
from coordinator.testing.conformance_fused import check_fused
from coordinator.testing.conformance_inputs import DTYPES
from coordinator.testing.conformance_refusals import check_refusals
from coordinator.testing.fake_planes import FakeCommunicator
from coordinator.testing.fakes import FakeGroupCoordinator, fake_groups
from device_comm import checks
from device_comm.base import DeviceCommunicator
from shm_broadcast.errors import UsageError

__all__ = [
    "PARTS",
    "ConformanceError",
    "FakeCommunicator",
    "FakeGroupCoordinator",
    "ObjectExchange",
    "check_device_communicator",
    "fake_groups",
]

PARTS = {
    "all_gather": moves.check_all_gather,
    "all_gatherv": moves.check_all_gatherv,
    "gather": moves.check_gather,
    "broadcast": moves.check_broadcast,
    "all_reduce": reductions.check_all_reduce,
    "all_reduce_": reductions.check_all_reduce_in_place,
    "autograd": reductions.check_autograd,
    "reduce_scatter": reductions.check_reduce_scatter,
    "reduce_scatterv": reductions.check_reduce_scatterv,
    "reduce": exchanges.check_reduce,
    "scatter": exchanges.check_scatter,
    "all_to_all": exchanges.check_all_to_all,
    "all_reduce_into_output": outputs.check_all_reduce_into_output,
    "reduce_scatterv_into_output": outputs.check_reduce_scatterv_into_output,
    "all_gatherv_into_output": outputs.check_all_gatherv_into_output,
    "all_to_all_into_output": outputs.check_all_to_all_into_output,
    "fused": check_fused,
    "send and recv": moves.check_point_to_point,
    "refusals": check_refusals,
    "prepare_buffers": moves.check_prepare_buffers,
}


def check_device_communicator(
    communicator: DeviceCommunicator,
    *,
    dtypes: Sequence[torch.dtype] | None = None,
    host: ObjectExchange | None = None,
    exact_reductions: bool = True,
    destroy: bool = True,
    parts: Sequence[str] | None = None,
    timeout_s: float = 60.0,
) -> None:
    """Check every clause of the contract of `DeviceCommunicator`.

    Collective: all ranks of the communicator's group call it with equal arguments. It makes about two thousand calls
    of at most 66 KB each. A `FakeCommunicator` is checked against what a fake promises.

    Args:
        communicator: The communicator to check, usually `group.device_communicator`.
        dtypes: The dtypes to move and reduce; default: those that serving engines use.
        host: Exchanges the ranks' findings so that all ranks raise the same error; usually the group itself.
            Without it the communicator under test carries only a flag and a digest per rank, and only the rank that
            found a violation can name it.
        exact_reductions: Whether sums, means and products of floating and complex dtypes must match
            `device_comm.reduction` bit for bit (rank order, float32 for narrow dtypes). If False, rounding may differ.
        destroy: Whether to destroy the communicator at the end, twice.
        parts: Names from `PARTS` to check; default: all.
        timeout_s: Deadline of each receive, in seconds; collectives use the group's.

    Raises:
        ConformanceError: A clause is violated. The text names the clause and the call, with expected and actual result.
        UsageError: An argument of this function is wrong.
    """
    if not isinstance(communicator, DeviceCommunicator):
        raise UsageError(f"expected a DeviceCommunicator, not {type(communicator).__name__}")
    chosen = DTYPES if dtypes is None else tuple(dtypes)
    if not chosen or not all(isinstance(each, torch.dtype) for each in chosen):
        raise UsageError(f"dtypes must be a sequence of torch dtypes, not {dtypes!r}")
    checks.check_timeout(timeout_s)
    alike = isinstance(communicator, FakeCommunicator)
    unknown = [name for name in parts or () if name not in PARTS]
    if unknown:
        raise UsageError(f"unknown parts {unknown}; choose from {', '.join(PARTS)}")
    check = Checker(communicator, chosen, host, alike=alike, exact=exact_reductions, timeout_s=timeout_s)
    for name, part in PARTS.items():
        if parts is None or name in parts:
            check.run_part(name, part)
    if destroy:
        check.run_part("destroy", moves.check_destroy, exchange=False)
