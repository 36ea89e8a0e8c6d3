"""The process group of the backend: torch's calls on a group whose ranks share memory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from coordinator.bootstrap.group_parts import GroupParts
from coordinator.calls import Calls
from coordinator.host.open_sends import OpenSends
from coordinator.host.process_groups import new_group
from coordinator.host.tags import FIRST_USER_TAG
from coordinator.torch_backend import monitored_barrier
from coordinator.torch_backend.errors import for_torch
from coordinator.torch_interop.collectives import Tensors, TorchCollectives, routed
from coordinator.torch_interop.works import AnyWork, CallWork, Landing, TransferWork
from device_comm import checks
from device_comm.base import Timeout
from device_comm.handles import Handle
from device_comm.movable import movable
from device_comm.process_group import dense
from device_comm.works import WaiterThreads
from shm_broadcast.errors import CommError, UsageError
from shm_broadcast.liveness import ProcessIdentity

BACKEND: Final = "group_coordinator"

# How long `shutdown` may take.
DESTROY_S: Final = 5.0
# A call that waits notices within this time that the group is closed.
_CALLS_END_S: Final = 0.3


class BackendProcessGroup(TorchCollectives):
    """A process group of the backend. torch calls its methods by torch's names; ranks are ranks in the group."""

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False

    def __init__(
        self,
        parts: GroupParts,
        processes: Mapping[int, ProcessIdentity],
        store: dist.Store,
        own_store: dist.Store,
        timeout_s: float,
    ) -> None:
        """Take over the parts of a group.

        Args:
            parts: The group, whose ranks share memory or of which there is one.
            processes: The ranks' processes, by global rank.
            store: The store that torch made for the group.
            own_store: A store whose keys are used by this group only.
            timeout_s: Deadline of a call that states none, in seconds.
        """
        health = parts.health
        communicator = parts.communicator
        calls = Calls(
            health,
            parts.device,
            is_alone=len(health.ranks) == 1,
            is_collecting=lambda: communicator.is_collecting,
        )
        threads = WaiterThreads(f"{health.name}-callbacks")
        rank = health.ranks.index(health.rank)
        super().__init__(rank, len(health.ranks), calls, lambda: communicator, threads)
        self.processes = processes
        self._parts = parts
        self._store = store
        self._own_store = own_store
        self._timeout_s = timeout_s
        self._callbacks = threads
        self._open_sends = OpenSends()
        self._beside: dict[str, dist.ProcessGroup] = {}
        self._barriers = itertools.count(1)
        self._name = self._description = health.name
        self._is_ending = False

    # ------------------------------------------------------------------ what torch asks of a process group

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the backend's name."""
        return BACKEND

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Return the name under which torch finds the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        """Set that name."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        """Return the description that the group was created with."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - torch's name
        """Set that description."""
        self._description = description

    def get_group_store(self) -> dist.Store:
        """Return the store of the group."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in self._backends()]

    def _get_backend(self, device: torch.device) -> Any:
        """Return what carries the calls on tensors of `device`."""
        if device.type == self.device_type or self not in self._configurations():
            # torch also asks while it still creates the group, whether an accelerator's backend could be split.
            return self
        there: Any = self.beside(device.type)
        return there._get_backend(device)  # noqa: SLF001 - torch's name

    @property
    def options(self) -> Any:
        """Return the options that torch copies for a group that is split off."""
        return Backend.Options(BACKEND, timedelta(seconds=self._timeout_s))

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of later calls that state none."""
        self._timeout_s = timeout.total_seconds()
        self.default_s: Timeout = self._timeout_s

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: calls have numbers from the beginning."""

    @staticmethod
    def _configurations() -> dict[object, str]:
        """Return torch's table of the backends of each group."""
        torch_world: Any = dist.distributed_c10d
        table: dict[object, str] = torch_world._world.pg_backend_config
        return table

    def _backends(self) -> dict[str, str]:
        """Return the name of the backend for each device type, as the group was created with."""
        config = self._configurations().get(self, "")
        pairs = [part.partition(":") for part in str(config).split(",") if ":" in part]
        return {device: name for device, _, name in pairs} or {self.device_type: BACKEND}

    def beside(self, device: str) -> dist.ProcessGroup:
        """Return the process group for tensors on another device type; the first call on such a tensor makes it."""
        found = self._beside.get(device)
        if found is None:
            name = self._backends().get(device, BACKEND)
            if name == BACKEND:
                error = UsageError(
                    f"{self._parts.health.where('a call')}: the tensors are on {device}, which this group does not "
                    f"serve; initialise with 'cpu:{BACKEND},{device}:…'"
                )
                raise for_torch(error)
            ranks = self._parts.health.ranks
            found = new_group(ranks, f"{device}:{name}", f"{self._name} {device}", self._timeout_s)
            # Destroyed with the parts.
            self._parts.process_groups.adopt(found)
            self._beside[device] = found
        return found

    def translated(self, error: CommError, within_s: float | None = None) -> Exception:
        """Return `error` as an error of torch's, too."""
        return for_torch(error, self._timeout_s if within_s is None else within_s)

    # ------------------------------------------------------------------ barriers

    def barrier(self, opts: Any = None) -> CallWork:
        """Wait for all ranks."""
        barrier = self._parts.host.barrier
        return self._run("barrier", opts, lambda _, timeout_s: barrier(timeout_s), ())

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; the group survives if some do not come, see `monitored_barrier.wait`."""
        within_s = self._timeout_s if timeout is None or timeout < timedelta(0) else timeout.total_seconds()
        try:
            self._calls.enter("monitored_barrier", in_line=False)
            scope = dist.PrefixStore(f"monitored_barrier/{next(self._barriers)}", self._own_store)
            monitored_barrier.wait(scope, self._parts.health, within_s, wait_all_ranks=wait_all_ranks)
        except CommError as error:
            raise for_torch(error) from error

    # ------------------------------------------------------------------ point to point

    @routed
    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> TransferWork:  # noqa: N803 - torch's name
        """Start to send a tensor to a rank of the group."""

        def start(tensor: torch.Tensor) -> Handle:
            # As with Gloo, sender and receiver agree on the number of elements, not on the shape.
            source = dense(movable(tensor)).view(-1)
            handle = self._parts.host.isend_tensor(source, dstRank, self._timeout_s, _wire(tag))
            self._open_sends.keep(handle)
            return handle

        return self._transfer("send", tensors, dstRank, start)

    @routed
    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> TransferWork:  # noqa: N803 - torch's name
        """Start to receive a tensor from a rank of the group."""

        def start(tensor: torch.Tensor) -> Handle:
            checks.check_writable(tensor, "recv")
            into = movable(tensor.detach())
            flat = into.view(-1) if into.is_contiguous() else into.new_empty(into.numel())
            handle = self._parts.host.irecv_tensor(flat, srcRank, self._timeout_s, _wire(tag))
            return handle if into.is_contiguous() else Landing(handle, into, flat)

        return self._transfer("recv", tensors, srcRank, start)

    def _transfer(
        self, name: str, tensors: Tensors, peer: int, start: Callable[[torch.Tensor], Handle]
    ) -> TransferWork:
        try:
            with self._calls.call(name, in_line=False):
                (tensor,) = tensors
                checks.check_tensor(tensor, self._parts.device, name)
                checks.check_peer(peer, self.rank(), self.size(), "the other rank")
                return TransferWork(start(tensor), tensors, peer, self.translated)
        except CommError as error:
            raise self.translated(error) from error

    @routed
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> AnyWork:
        """Receive from any rank, inside the work's `wait`."""
        (tensor,) = tensors

        def receive(timeout_s: float | None) -> int:
            def take(limit_s: float | None) -> tuple[torch.Tensor, int]:
                checks.check_tensor(tensor, self._parts.device, "recv_any")
                checks.check_writable(tensor, "recv_any")
                into = movable(tensor.detach())
                return self._parts.host.recv_any((into.numel(),), into.dtype, _wire(tag), limit_s, into)

            _, src = self._calls.receive("recv_any", timeout_s or self._timeout_s, take)
            return src

        return AnyWork(receive, self.translated)

    # ------------------------------------------------------------------ life

    def shutdown(self) -> None:
        """Release everything within about `DESTROY_S`; what was sent can still be received. Idempotent."""
        self._end(DESTROY_S)

    def abort(self) -> None:
        """Release everything at once: calls that wait here and elsewhere end with an error. Idempotent."""
        self._end(0.0)

    def _end(self, within_s: float) -> None:
        if self._parts.health.is_inherited or self._is_ending:
            return
        # No function is called between the look at the flag and the `try`, so the call that sets the flag also
        # ends the group. What a signal handler raises in the `try` ends one wait only.
        self._is_ending = True
        try:
            self._release(within_s)
        except BaseException:
            self._release(0.0)
            raise

    def _release(self, within_s: float) -> None:
        """Release everything, even if one part is interrupted; another call then does the rest of that."""
        self._parts.health.close()
        deadline = time.monotonic() + within_s
        with ExitStack() as ending:
            ending.callback(self._beside.clear)
            ending.callback(lambda: self._callbacks.close(max(deadline - time.monotonic(), 0.1)))
            ending.callback(self._calls.close, within_s / 2)
            ending.callback(self._open_sends.clear)
            ending.callback(self._parts.destroy, within_s, self._open_sends)
            self._calls.close(min(_CALLS_END_S, within_s))


def _wire(tag: int) -> int:
    return FIRST_USER_TAG + tag


__all__ = ["BACKEND", "BackendProcessGroup"]
