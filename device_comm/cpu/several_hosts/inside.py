"""One host of a group over several: what its ranks do among themselves in a call, alone or over shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from device_comm import _core
from device_comm.cpu.native_codes import COPY_ONLY, OPERATION_CODES, TYPE_CODES
from device_comm.cpu.several_hosts.leaders import Call
from device_comm.cpu.shared_memory import SharedPart
from device_comm.health import GroupHealth
from device_comm.reduction import ReduceOperation
from shm_broadcast.errors import DisagreementError

# Beyond this size more than two ranks of a host share the work of combining; else the leader does it alone.
_SHARED_WORK_BYTES: Final = 64 << 10


class LoneHost:
    """The inside of a host that holds one rank: it has everything already."""

    def combine(self, call: Call, flat: torch.Tensor, op: ReduceOperation) -> torch.Tensor:
        """Return the host's elements combined in rank order; on ranks other than the leader, unspecified data."""
        del call, op
        return flat

    def pass_on(self, call: Call, flat: torch.Tensor, code: int = COPY_ONLY, root: int = 0) -> None:
        """Copy the bytes of `flat` from rank `root` of the host, by default the leader, to all its ranks."""

    def meet(self, call: Call) -> None:
        """Return once all ranks of the host have come."""

    def gather(
        self, call: Call, source: torch.Tensor, block: torch.Tensor, lengths: tuple[int, ...], code: int
    ) -> None:
        """Put `lengths[i]` bytes of each rank of the host into `block`, one rank after the other."""
        del call, lengths, code
        block.copy_(source)

    def scatter(
        self, call: Call, block: torch.Tensor | None, result: torch.Tensor, counts: Sequence[int]
    ) -> None:
        """Cut the leader's `block` into `counts` elements for each rank of the host; the own ones go to `result`."""
        del call, counts
        if block is not None:
            # Outside of inference mode torch refuses to write into tensors that were made in it.
            with torch.inference_mode():
                result.copy_(block)

    def combine_slices(
        self, call: Call, flat: torch.Tensor, counts: Sequence[int], op: ReduceOperation
    ) -> torch.Tensor:
        """Return this rank's slice of what `combine` returns: `counts[i]` elements on the host's `i`th rank.

        `counts` may hold fewer entries than the host has ranks; the remaining ranks get nothing.
        """
        del counts
        return self.combine(call, flat, op)

    def gather_slices(
        self, call: Call, own: torch.Tensor, flat: torch.Tensor, counts: Sequence[int], code: int
    ) -> None:
        """Fill `flat` on all ranks from each rank's slice `own` of it, which has `counts[i]` elements."""

    def close(self) -> None:
        """Release nothing."""


class SharedHost:
    """The inside of a host whose ranks share a region; its methods are those of `LoneHost`."""

    def __init__(self, part: SharedPart, place: int, members: int, health: GroupHealth) -> None:
        """Use `part`, owned from now on, as the rank at `place` among the `members` ranks of this host."""
        self._part = part
        self._core = part.device.core
        self._place = place
        self._members = members
        self._health = health

    def _finish(self, call: Call, status: int) -> None:
        """Wait for a step that has begun."""
        call.announce_in_time(self._health)
        if status == _core.DONE:
            return
        try:
            self._part.device.finish_part(call.operation, status, call.left_s())
        except DisagreementError as error:
            # The ranks may differ in what only the digest covers.
            text = (
                f"{error}; on this rank: {call.operation}, {call.view}; the group is now unusable, destroy it"
            )
            failure = DisagreementError(text, views=error.views)
            # The other hosts do not learn of this disagreement and would wait, so nobody can go on.
            self._health.fail(failure)
            raise failure from error

    def combine(self, call: Call, flat: torch.Tensor, op: ReduceOperation) -> torch.Tensor:
        """Do what `LoneHost.combine` says."""
        is_shared = self._members > 2 and flat.nbytes > _SHARED_WORK_BYTES
        kind = _core.ALL_REDUCE_TWO_SHOT if is_shared else _core.REDUCE
        result = torch.empty_like(flat)
        # The sum of all hosts is divided once, at the end.
        code = OPERATION_CODES[ReduceOperation.SUM if op is ReduceOperation.MEAN else op]
        addresses = (flat.data_ptr(), result.data_ptr())
        codes = (TYPE_CODES[flat.dtype], code)
        self._finish(call, self._core.reduce(kind, *addresses, flat.numel(), *codes, 0, call.digest))
        return result

    def pass_on(self, call: Call, flat: torch.Tensor, code: int = COPY_ONLY, root: int = 0) -> None:
        """Do what `LoneHost.pass_on` says."""
        if flat.numel():
            self._finish(call, self._core.broadcast(flat.data_ptr(), flat.nbytes, code, root, call.digest))

    def meet(self, call: Call) -> None:
        """Do what `LoneHost.meet` says."""
        self._finish(call, self._core.barrier(call.digest))

    def gather(
        self, call: Call, source: torch.Tensor, block: torch.Tensor, lengths: tuple[int, ...], code: int
    ) -> None:
        """Do what `LoneHost.gather` says."""
        addresses = (source.data_ptr(), block.data_ptr())
        self._move(call, _core.ALL_GATHER, addresses, lengths, code)

    def scatter(
        self, call: Call, block: torch.Tensor | None, result: torch.Tensor, counts: Sequence[int]
    ) -> None:
        """Do what `LoneHost.scatter` says."""
        widths = tuple(count * result.itemsize for count in counts)
        addresses = (0 if block is None else block.data_ptr(), result.data_ptr())
        code = TYPE_CODES[result.dtype]
        self._move(call, _core.SCATTER, addresses, widths, code)

    def combine_slices(
        self, call: Call, flat: torch.Tensor, counts: Sequence[int], op: ReduceOperation
    ) -> torch.Tensor:
        """Do what `LoneHost.combine_slices` says."""
        place = self._place
        result = flat.new_empty(counts[place] if place < len(counts) else 0)
        code = OPERATION_CODES[ReduceOperation.SUM if op is ReduceOperation.MEAN else op]
        addresses = (flat.data_ptr(), result.data_ptr())
        widths = self._widths(counts, flat.itemsize)
        self._move(call, _core.REDUCE_SCATTER, addresses, widths, TYPE_CODES[flat.dtype], code)
        return result

    def gather_slices(
        self, call: Call, own: torch.Tensor, flat: torch.Tensor, counts: Sequence[int], code: int
    ) -> None:
        """Do what `LoneHost.gather_slices` says."""
        addresses = (own.data_ptr(), flat.data_ptr())
        widths = self._widths(counts, flat.itemsize)
        self._move(call, _core.ALL_GATHER, addresses, widths, code)

    def _move(
        self,
        call: Call,
        kind: int,
        addresses: tuple[int, int],
        widths: tuple[int, ...],
        code: int,
        op_code: int = 0,
    ) -> None:
        self._finish(call, self._core.move(kind, *addresses, 1, widths, code, op_code, 0, call.digest))

    def _widths(self, counts: Sequence[int], itemsize: int) -> tuple[int, ...]:
        padded = [*counts, *[0] * (self._members - len(counts))]
        return tuple(count * itemsize for count in padded)

    def close(self) -> None:
        """Release the shared region. Idempotent."""
        self._part.close()


__all__ = ["LoneHost", "SharedHost"]
