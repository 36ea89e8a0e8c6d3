"""A `GroupCoordinator` that vLLM creates and uses in place of its own."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import torch
import torch.distributed as dist

from coordinator.group import GroupCoordinator
from coordinator.integrations.vllm.message_queue import MessageQueue, MessageQueueHandle
from device_comm import checks
from shm_broadcast.errors import CapabilityError, CommError, UsageError

__all__ = ["STATE", "VllmGroupCoordinator"]

STATE: Final = "vllm.distributed.parallel_state"


class VllmGroupCoordinator(GroupCoordinator):
    """A group whose queues and experts follow vLLM's rules; constructor and attributes are those of the base class."""

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
        checks.check_rank(writer_rank, self.world_size, "writer_rank")
        offer = None
        if self.rank_in_group == writer_rank and external_writer_handle is not None:
            offer = (external_writer_handle.queue, external_writer_handle.key)
        # Only the rank that holds the handle knows whether there is one.
        offer = self.broadcast_object(offer, writer_rank, timeout_s=self.settings.create_timeout_s)
        if offer is None:
            return MessageQueue.of(super().create_mq_broadcaster(writer_rank, blocking=blocking))
        handle = MessageQueueHandle(*offer)
        return self._together(lambda: MessageQueue.create_from_handle(handle, self.rank_in_group))

    def create_single_reader_mq_broadcasters(
        self, reader_rank_in_group: int = 0, blocking: bool = False
    ) -> Any:
        """Create a queue from every rank to one reader on the host of rank `reader_rank_in_group`. Collective.

        The reader is the executor, which is no member of the group. Unlike in the base class, it opens the reading ends
        from the handles.

        Args:
            reader_rank_in_group: The rank that gets the handles.
            blocking: Whether to wait until the reader has opened this rank's queue.

        Returns:
            (this rank's writing end, the handles of all ranks in rank order), and elsewhere an empty list of handles.

        Raises:
            CapabilityError: A rank could not create its queue. Every rank raises this, and the group stays usable.
        """
        checks.check_rank(reader_rank_in_group, self.world_size, "reader_rank_in_group")
        hosts = self._parts.host_ids
        is_local = hosts[self.rank] == hosts[self.ranks[reader_rank_in_group]]
        address = None if is_local else self._parts.process_groups.address
        queue = self._together(lambda: MessageQueue(1, int(is_local), connect_ip=address))
        handle = queue.export_handle()
        offers = self.gather_object((handle.queue, handle.key), reader_rank_in_group)
        if blocking:
            queue.wait_until_ready()
        return queue, [MessageQueueHandle(*offer) for offer in offers or ()]

    def cpu_all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a small CPU tensor over all ranks in place, and return it. Collective.

        On an accelerator the sum goes over the group's Gloo process group, as the tensor is not on the group's device.
        """
        if self.device.type == "cpu":
            return tensor.copy_(self.all_reduce(tensor))
        dist.all_reduce(tensor, group=self.cpu_group)
        return tensor

    # ------------------------------------------------------------------ experts

    def dispatch(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[torch.Tensor] | None = None,
    ) -> tuple[Any, ...]:
        """Send all tokens, with their experts and weights, to all ranks that share the experts. Collective.

        Args:
            hidden_states: One row for each token of this rank.
            topk_weights: As many rows: the weights of the token's experts.
            topk_ids: As many rows: the token's experts.
            is_sequence_parallel: Whether each rank of the expert group holds tokens of its own.
            extra_tensors: Further tensors with one row for each token.

        Returns:
            The three tensors with the rows of all ranks, in rank order; then a list of the further ones, if given.
        """
        return self._dispatch([hidden_states, topk_weights, topk_ids], is_sequence_parallel, extra_tensors)

    def dispatch_router_logits(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[torch.Tensor] | None = None,
    ) -> tuple[Any, ...]:
        """Send all tokens, with the router's results, to all ranks that share the experts; see `dispatch`."""
        return self._dispatch([hidden_states, router_logits], is_sequence_parallel, extra_tensors)

    def combine(  # type: ignore[override]
        self, hidden_states: torch.Tensor, is_sequence_parallel: bool = False
    ) -> torch.Tensor:
        """Sum the experts' results of all ranks, and return the rows of this rank's tokens. Collective.

        Args:
            hidden_states: One row for each token of all ranks, as `dispatch` returned them.
            is_sequence_parallel: As in `dispatch`.
        """
        group = self._token_group(is_sequence_parallel)
        sizes = _token_counts(hidden_states.shape[0] // group.world_size, group.world_size)
        return group.reduce_scatterv(hidden_states, 0, sizes)

    def allocate_combine_input(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        is_sequence_parallel: bool = False,
    ) -> None:
        """Return None: the caller's own tensor is as good, because `combine` needs no registered memory."""

    def combine_into_output(
        self, hidden_states: torch.Tensor, output: torch.Tensor, is_sequence_parallel: bool = False
    ) -> torch.Tensor:
        """Do `combine`, write the result into `output`, and return `output`."""
        return output.copy_(self.combine(hidden_states, is_sequence_parallel))

    def _dispatch(
        self,
        tensors: list[torch.Tensor],
        is_sequence_parallel: bool,
        extra_tensors: list[torch.Tensor] | None,
    ) -> tuple[Any, ...]:
        if extra_tensors is not None and not isinstance(extra_tensors, (list, tuple)):
            raise UsageError(f"dispatch: extra_tensors must be a list of tensors, not {extra_tensors!r}")
        group = self._token_group(is_sequence_parallel)
        sizes = _token_counts(tensors[0].shape[0], group.world_size)
        if sizes[group.rank_in_group] != tensors[0].shape[0]:
            raise UsageError(
                f"dispatch: vLLM's forward context states {sizes[group.rank_in_group]} tokens for this rank, which "
                f"holds {tensors[0].shape[0]}"
            )
        gathered = group.all_gatherv([*tensors, *(extra_tensors or ())], 0, sizes)
        own, extra = gathered[: len(tensors)], gathered[len(tensors) :]
        return tuple(own) if extra_tensors is None else (*own, extra)

    def _token_group(self, is_sequence_parallel: bool) -> GroupCoordinator:
        """Return the group whose ranks hold different tokens, by vLLM's rules."""
        state, config = import_module(STATE), import_module("vllm.config")
        replicas, context = state.get_dp_group(), state.get_pcp_group()
        group = context
        if is_sequence_parallel:
            group = state.get_ep_group()
        elif replicas.world_size > 1:
            parallel = config.get_current_vllm_config().parallel_config
            group = (
                state.get_ep_group()
                if parallel.enable_expert_parallel and context.world_size > 1
                else replicas
            )
        if not isinstance(group, GroupCoordinator):
            raise UsageError(f"{group!r} is a group of vLLM's own, which an elastic engine uses")
        return group

    def _together(self, make: Callable[[], MessageQueue]) -> MessageQueue:
        """Return what `make` returns if it succeeds on every rank, else raise the same error on all. Collective."""
        queue, failure = None, ""
        try:
            queue = make()
        except CommError as error:
            failure = f"rank {self.rank}: {error}"
        failures = self.all_gather_object(failure, timeout_s=self.settings.create_timeout_s)
        reasons = "; ".join(each for each in failures if each)
        if queue is None or reasons:
            if queue is not None:
                queue.shutdown()
            raise CapabilityError(f"{self._health.where('create queue')}: {reasons}")
        return queue


def _token_counts(own: int, world_size: int) -> list[int]:
    """Return the number of tokens of each rank: vLLM states them where replicas differ; otherwise they are equal."""
    if import_module(STATE).get_dp_group().world_size == 1:
        return [own] * world_size
    counts = (
        import_module("vllm.forward_context")
        .get_forward_context()
        .dp_metadata.get_chunk_sizes_across_dp_rank()
    )
    return [int(count) for count in counts]
