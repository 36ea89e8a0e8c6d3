"""A `GroupCoordinator` that vLLM creates and uses in place of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling

from coordinator.group import GroupCoordinator
from coordinator.integrations.vllm.announcement import announce
from coordinator.integrations.vllm.message_queue import MessageQueue, MessageQueueHandle
from coordinator.settings import CoordinatorSettings
from device_comm import checks
from device_comm.health import Operation
from device_comm.outputs import fill
from device_comm.stages import in_parts
from shm_broadcast.errors import CapabilityError, DisagreementError, UsageError
from shm_broadcast.interruption import raised_by_handler

__all__ = ["STATE", "VllmGroupCoordinator"]

STATE: Final = "vllm.distributed.parallel_state"

# vLLM makes its queues after each rank has loaded its weights, and one host may read them from a cold disk for long
# after the others. torch's process groups, which vLLM would use, wait for half an hour.
LOADING_S: Final = 1800.0
# A queue takes several calls. What interrupts a rank between two of them breaks the group: the others wait in the next.
_CREATION: Final = Operation("host", "create queue", 0)


@dataclasses.dataclass(frozen=True)
class _Experts:
    """What vLLM asks of `all2all_manager` of the communicator of an expert-parallel group.

    Attributes:
        rank: In the group.
        world_size: Of the group.
        dp_world_size: How many replicas have tokens of their own.
        support_fault_tolerance: Whether it goes on without ranks that fail.
    """

    rank: int
    world_size: int
    dp_world_size: int
    support_fault_tolerance: bool = False


class VllmGroupCoordinator(GroupCoordinator):
    """A group whose queues and experts follow vLLM's rules; constructor and attributes are those of the base class."""

    def __init__(
        self,
        group_ranks: Sequence[Sequence[int]],
        local_rank: int,
        torch_distributed_backend: str,
        use_device_communicator: bool,
        use_message_queue_broadcaster: bool = False,
        group_name: str | None = None,
        use_all2all: bool = False,
        *,
        settings: CoordinatorSettings | None = None,
    ) -> None:
        """Create a group as the base class does, and say what vLLM asks of the communicator of its experts."""
        super().__init__(
            group_ranks,
            local_rank,
            torch_distributed_backend,
            use_device_communicator,
            use_message_queue_broadcaster,
            group_name,
            use_all2all,
            settings=settings,
        )
        if self.use_all2all and self.world_size > 1:
            try:
                # With several replicas of a mixture of experts vLLM reads this before it calls `dispatch`.
                replicas: int = import_module(STATE).get_dp_group().world_size
                communicator: Any = self.device_communicator
                communicator.all2all_manager = _Experts(self.rank_in_group, self.world_size, replicas)
            except BaseException:
                # The caller never gets this group, and so cannot destroy it.
                self.destroy()
                raise

    def _create(self, *parts: Any) -> None:
        """Refuse, on every rank alike, what vLLM's elastic engine would make of this group."""
        parallel = _parallel_config()
        if parallel is not None and parallel.enable_elastic_ep:
            raise CapabilityError(
                "vLLM's elastic expert parallelism (enable_elastic_ep) works with groups of vLLM's own, which it "
                "exchanges while the engine runs, and not with those of group_coordinator: take group_coordinator out "
                "of VLLM_PLUGINS, or unset VLLM_PLUGINS"
            )
        super()._create(*parts)

    def _bind(self, *parts: Any) -> None:
        super()._bind(*parts)
        parallel = _parallel_config()
        self._sums_in_place = self.device.type == "cpu"
        self._spreads_experts = parallel is not None and parallel.enable_expert_parallel
        # Ranks of a node as vLLM counts them, if its engine spans several; None: hosts are compared. Two nodes
        # may be one host, and each has an executor of its own.
        self._node_ranks: int | None = None
        if parallel is not None and parallel.nnodes_within_dp > 1:
            self._node_ranks = parallel.local_world_size
        announce()

    def create_mq_broadcaster(  # type: ignore[override]
        self,
        writer_rank: int = 0,
        external_writer_handle: MessageQueueHandle | None = None,
        blocking: bool = True,
    ) -> Any:
        """Create a queue from rank `writer_rank` to all others, or open that of the executor. Collective.

        Args:
            writer_rank: Rank in the group; with an executor's queue, a rank that holds its handle.
            external_writer_handle: On rank `writer_rank` the handle of a queue whose readers are all ranks of this
                group, by rank in the group; ignored elsewhere.
            blocking: Whether to wait until every rank has its end.

        Returns:
            This rank's end; with an executor's queue the reading end on every rank.

        Raises:
            CapabilityError: A rank could not open its end. Every rank raises this, and the group stays usable.
        """
        with self._calls.call("create_mq_broadcaster", plane="host"):
            checks.check_rank(writer_rank, self.world_size, "writer_rank")

        def stages() -> Any:
            offer: tuple[bytes, bytes, str] | None = None
            if self.rank_in_group == writer_rank and external_writer_handle is not None:
                offer = _offered(external_writer_handle)
            # Only the rank that holds the handle knows whether there is one. All ranks tell each other, and not one of
            # them all others, so that each learns of a rank that refuses the call.
            told = self.all_gather_object((writer_rank, offer), timeout_s=LOADING_S)
            if any(writer != writer_rank for writer, _ in told):
                views = {
                    rank: f"writer_rank {writer}" for rank, (writer, _) in zip(self.ranks, told, strict=True)
                }
                text = f"{self._health.where('create queue')}: the ranks name different writers: {views}"
                raise DisagreementError(text, views=views)
            offer = told[writer_rank][1]
            if offer is None:
                return MessageQueue.of(
                    super(VllmGroupCoordinator, self).create_mq_broadcaster(writer_rank, blocking=blocking)
                )
            if offer[2]:
                raise UsageError(f"{self._health.where('create queue')}: {offer[2]}")
            handle = MessageQueueHandle(*offer[:2])
            return self._together(lambda: MessageQueue.create_from_handle(handle, self.rank_in_group))

        return in_parts(self._health, _CREATION, stages)

    def create_single_reader_mq_broadcasters(
        self, reader_rank_in_group: int = 0, blocking: bool = False
    ) -> Any:
        """Create a queue from every rank to one reader on the node of rank `reader_rank_in_group`. Collective.

        The reader is the executor, which is no member of the group. Unlike in the base class, it opens the reading ends
        from the handles.

        Args:
            reader_rank_in_group: The rank that gets the handles.
            blocking: Must be False: no reader can open a queue before this has returned its handle.

        Returns:
            (this rank's writing end, the handles of all ranks in rank order), and elsewhere an empty list of handles.

        Raises:
            UsageError: `blocking` is True; nothing was sent.
            CapabilityError: A rank could not create its queue. Every rank raises this, and the group stays usable.
        """
        with self._calls.call("create_single_reader_mq_broadcasters", plane="host"):
            checks.check_rank(reader_rank_in_group, self.world_size, "reader_rank_in_group")
            if blocking:
                raise UsageError(
                    "create_single_reader_mq_broadcasters: the reader opens its ends later; pass blocking=False"
                )
        is_local = self._is_on_node_of(reader_rank_in_group)
        address = None if is_local else self._parts.process_groups.address

        def stages() -> tuple[MessageQueue, list[MessageQueueHandle]]:
            queue = self._together(lambda: MessageQueue(1, int(is_local), connect_ip=address))
            try:
                handle = queue.export_handle()
                offers = self.gather_object((handle.queue, handle.key), reader_rank_in_group)
                return queue, [MessageQueueHandle(*offer) for offer in offers or ()]
            except BaseException:
                queue.shutdown()
                raise

        return in_parts(self._health, _CREATION, stages)

    def _is_on_node_of(self, rank_in_group: int) -> bool:
        if self._node_ranks is not None:
            return self.rank_in_group // self._node_ranks == rank_in_group // self._node_ranks
        hosts = self._parts.host_ids
        return hosts[self.rank] == hosts[self.ranks[rank_in_group]]

    def all_reduce(self, input_: torch.Tensor, *args: Any, **how: Any) -> Any:
        """Do `GroupCoordinator.all_reduce`; a plain call in a model that runs on the CPU writes into `input_`.

        vLLM's communicator for CPUs does so too. Between the layers of a model, when the caches hold other code, this
        takes 42 us, and a call that creates its result takes 64.
        """
        if args or how or not self._sums_in_place or is_grad_enabled() or is_dynamo_compiling():
            return super().all_reduce(input_, *args, **how)
        # As in `all_reduce_`, whose frame and checks would cost a third of the call between the layers of a model.
        self._calls.enter("all_reduce_")
        try:
            return self.device_communicator.all_reduce_(input_)
        except BaseException as error:
            self._calls.unwind("all_reduce_", error, "device")
            raise

    def cpu_all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a small CPU tensor over all ranks in place, and return it. Collective.

        On an accelerator the sum goes over the group's Gloo process group, as the tensor is not on the group's device.
        """
        if self.device.type == "cpu":
            fill(tensor, self.all_reduce(tensor))
            return tensor
        dist.all_reduce(tensor, group=self.cpu_group)
        return tensor

    # ------------------------------------------------------------------ experts

    def _serving(self, is_sequence_parallel: bool) -> GroupCoordinator:
        """Return the group that makes a call on the tokens of this one, the group of the experts, by vLLM's rules.

        With sequence parallelism each rank of the experts' group has tokens of its own. Otherwise the ranks of a
        tensor-parallel group have the same tokens, and the replicas, or the ranks that share a prompt, have different
        ones.
        """
        if is_sequence_parallel:
            return self
        state = import_module(STATE)
        # An elastic engine would have a group of vLLM's own for the replicas; `_create` refuses it.
        replicas: GroupCoordinator = state.get_dp_group()
        context: GroupCoordinator = state.get_pcp_group()
        if replicas.world_size == 1:
            return context
        return self if self._spreads_experts and context.world_size > 1 else replicas

    def _together(self, make: Callable[[], MessageQueue]) -> MessageQueue:
        """Return what `make` returns if it succeeds on every rank, else raise the same error on all. Collective."""
        queue, failure = None, ""
        try:
            try:
                queue = make()
            except Exception as error:
                if raised_by_handler(error):
                    raise
                # Whatever it is, the other ranks must hear of it.
                failure = f"rank {self.rank}: {type(error).__name__}: {error}"
            failures = self.all_gather_object(failure, timeout_s=LOADING_S)
            reasons = "; ".join(each for each in failures if each)
            if queue is not None and not reasons:
                return queue
        except BaseException:
            if queue is not None:
                queue.shutdown()
            raise
        if queue is not None:
            queue.shutdown()
        raise CapabilityError(f"{self._health.where('create queue')}: {reasons}")


def _offered(given: object) -> tuple[bytes, bytes, str]:
    """Return handle and key of an executor's queue, or the reason why `given` is none."""
    if isinstance(given, MessageQueueHandle):
        return given.queue, given.key, ""
    return b"", b"", f"external_writer_handle is a {type(given).__qualname__}, no handle of this plugin"


def _parallel_config() -> Any:
    """Return vLLM's configuration of its parallel layout, or None.

    It can be asked for while groups are made, but not while a model runs.
    """
    config = import_module("vllm.config").get_current_vllm_config_or_none()
    return None if config is None else config.parallel_config
