"""A `GroupCoordinator` that SGLang creates and uses in place of its own."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import msgspec
import torch
from torch.compiler import is_dynamo_compiling

from coordinator.group import GroupCoordinator
from coordinator.settings import CoordinatorSettings
from device_comm.handles import Handle
from shm_broadcast.errors import UsageError

__all__ = ["SglangGroupCoordinator", "SglangSend"]

_STATE: Final = "sglang.srt.distributed.parallel_state"


@dataclasses.dataclass(frozen=True, eq=False)
class SglangSend:
    """An open send, with the attributes that SGLang reads.

    Attributes:
        work: Its handle. The handle keeps what is sent.
        payload: None; SGLang keeps the sent tensor here.
    """

    work: Handle
    payload: torch.Tensor | None = None


class SglangGroupCoordinator(GroupCoordinator):
    """A group with the constructor, the attributes and the methods that SGLang expects.

    Where SGLang's method and the one of the base class have the same name but other parameters or results, this class
    has SGLang's; the base class describes the rest.

    Attributes:
        active_ranks: [world_size] int32 on the group's device: ones, as no rank is ever replaced.
        active_ranks_cpu: The same on the CPU.
        device_module: torch's module for the group's device, such as `torch.cuda`.
        local_size: Number of ranks of this group on this host.
    """

    # The communicators of SGLang's own group. It asks for each before it uses it; ours chooses by itself.
    pynccl_comm: Any = None
    pymscclpp_comm: Any = None
    ca_comm: Any = None
    qr_comm: Any = None
    pcie_ipc_comm: Any = None
    torch_symm_mem_comm: Any = None
    hpu_communicator: Any = None
    xpu_communicator: Any = None
    _fi_workspace_hint: str | None = None

    def __init__(
        self,
        group_ranks: Sequence[Sequence[int]],
        local_rank: int,
        torch_distributed_backend: str,
        use_pynccl: bool,
        use_mscclpp: bool,
        use_custom_allreduce: bool,
        use_torch_symm_mem_all_reduce: bool,
        use_hpu_communicator: bool,
        use_xpu_communicator: bool,
        use_message_queue_broadcaster: bool = False,
        group_name: str | None = None,
        gloo_timeout: timedelta | float | None = None,
        recovered_rank: bool = False,
        rank_offset: int = 0,
        max_world_size: int | None = None,
    ) -> None:
        """Create this rank's group, together with the other ranks of `group_ranks`; see `GroupCoordinator`.

        Args:
            group_ranks: Global ranks of every group of this kind.
            local_rank: Index of this process's device on its host.
            torch_distributed_backend: torch backend of the device group.
            use_pynccl: Kept as an attribute, as are the five after it. None of them chooses an algorithm: the group's
                communicator does, by device, size and topology.
            use_mscclpp: See `use_pynccl`.
            use_custom_allreduce: See `use_pynccl`.
            use_torch_symm_mem_all_reduce: See `use_pynccl`.
            use_hpu_communicator: See `use_pynccl`.
            use_xpu_communicator: See `use_pynccl`.
            use_message_queue_broadcaster: Whether `broadcast_object` uses a queue.
            group_name: Name such as "tp".
            gloo_timeout: How long a call waits for its peers, in seconds or as a timedelta; default: the settings'
                `timeout_s`.
            recovered_rank: Must be False; see below.
            rank_offset: Must be 0.
            max_world_size: Must be None.

        Raises:
            UsageError: One of the last three asks for a group whose ranks change while it lives, which needs Mooncake
                and SGLang's own groups. Nothing was sent.
            Others: As `GroupCoordinator`.
        """
        if recovered_rank or rank_offset or max_world_size is not None:
            raise UsageError(
                f"group {group_name!r}: recovered_rank={recovered_rank}, rank_offset={rank_offset} and "
                f"max_world_size={max_world_size} ask for a group whose ranks change, which needs SGLang's own groups"
            )
        settings = CoordinatorSettings.from_env()
        if gloo_timeout is not None:
            limit_s = gloo_timeout.total_seconds() if isinstance(gloo_timeout, timedelta) else gloo_timeout
            settings = msgspec.structs.replace(settings, timeout_s=limit_s)
        super().__init__(
            group_ranks,
            local_rank,
            torch_distributed_backend,
            True,
            use_message_queue_broadcaster,
            group_name,
            settings=settings,
        )
        self.use_pynccl = use_pynccl
        self.use_mscclpp = use_mscclpp
        self.use_custom_allreduce = use_custom_allreduce
        self.use_torch_symm_mem_all_reduce = use_torch_symm_mem_all_reduce
        self.use_hpu_communicator = use_hpu_communicator
        self.use_xpu_communicator = use_xpu_communicator
        self.use_message_queue_broadcaster = use_message_queue_broadcaster
        try:
            self._describe()
        except BaseException:
            # The caller never gets this group, and so cannot destroy it.
            self.destroy()
            raise

    def _describe(self) -> None:
        """Set what SGLang reads of the group, and let SGLang's custom operations find it."""
        self.active_ranks: torch.Tensor = torch.ones(self.world_size, dtype=torch.int32, device=self.device)
        self.active_ranks_cpu: torch.Tensor = torch.ones(self.world_size, dtype=torch.int32)
        self.device_module: Any = torch.get_device_module(self.device)
        hosts = self._parts.host_ids
        self.local_size: int = sum(hosts[rank] == hosts[self.rank] for rank in self.ranks)
        engine = sys.modules.get(_STATE)
        if engine is not None:
            # SGLang's custom operations look the group up by its name.
            engine._register_group(self)  # noqa: SLF001 - its own class calls this

    # ------------------------------------------------------------------ reductions

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Sum `input_` over all ranks in place, and return it. Collective.

        SGLang's callers use the result, but some rely on the change of the input. In a compiled graph the result is a
        new tensor, and the input stays as it is.
        """
        if self.world_size == 1:
            return input_
        if is_dynamo_compiling():
            return super().all_reduce(input_)
        return self.all_reduce_(input_)

    def quant_all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Do `all_reduce`, without quantisation: SGLang quantises on NPUs only."""
        return self.all_reduce(input_)

    def fused_allreduce_rmsnorm(
        self, input_: torch.Tensor, residual_inp_: torch.Tensor, weight_: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum, add the residual and normalise in one call; see `all_reduce_add_rms_norm`.

        Returns:
            (normed, new residual).
        """
        return self.all_reduce_add_rms_norm(input_, residual_inp_, weight_, eps)

    def fused_allreduce_rmsnorm_quant_per_group(
        self,
        input_: torch.Tensor,
        residual_inp_: torch.Tensor,
        weight_: torch.Tensor,
        eps: float,
        group_size: int = 128,
        emit_bf16: bool = False,
        transpose_scale: bool = False,
    ) -> None:
        """Return None, by which SGLang's callers know that they must make the steps one by one.

        SGLang's own group fuses these steps on some AMD devices, and answers None on all others.
        """

    def reduce_scatter_along_dim(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Sum the ranks' tensors; return this rank's part along `dim`, which must divide evenly. Collective."""
        return super().reduce_scatter(input_, dim)

    def reduce_scatter(  # type: ignore[override]
        self, output: torch.Tensor, input_list: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Sum the ranks' lists of tensors; fill `output` with this rank's element, and return it. Collective."""
        self.reduce_scatter_tensor(output, torch.stack(list(input_list)))
        return output

    def reduce_scatterv(  # type: ignore[override]
        self,
        input_: torch.Tensor,
        output: torch.Tensor | None = None,
        sizes: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Sum the ranks' tensors; return the rows of this rank, in `output` if there is one. Collective.

        Args:
            input_: [sum(sizes), …], of equal shape on all ranks.
            output: [sizes[rank], …].
            sizes: The rows of each rank; None splits evenly.
        """
        if output is None:
            return super().reduce_scatterv(input_, 0, sizes)
        return self.reduce_scatterv_into_output(input_, output, 0, sizes)

    # ------------------------------------------------------------------ gathers

    def all_gatherv(  # type: ignore[override]
        self,
        input_: torch.Tensor | Sequence[torch.Tensor],
        sizes: Sequence[int] | None = None,
        output: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Concatenate the ranks' rows, of which each may have another number. Collective.

        Args:
            input_: A tensor, or several with equally many rows.
            sizes: The rows of each rank; None means that all have equally many.
            output: [sum(sizes), …], for a single tensor only; it is filled.

        Returns:
            A list of the results, also for a single tensor.
        """
        if output is not None:
            if not isinstance(input_, torch.Tensor):
                refusal = UsageError("all_gatherv: output needs a single tensor as input")
                self._calls.refuse_unadmitted("all_gatherv", refusal)
            return [super().all_gatherv(input_, 0, sizes, output=output)]
        return super().all_gatherv([input_] if isinstance(input_, torch.Tensor) else list(input_), 0, sizes)

    # ------------------------------------------------------------------ point to point

    def send_object(  # type: ignore[override]
        self, obj: Any, dst: int, async_send: bool = False, tag: int = 0
    ) -> list[SglangSend]:
        """Send an object to rank `dst`, which calls `recv_object` with the same `tag`.

        Returns:
            With `async_send` a list with the open send; otherwise an empty list.
        """
        return _open(super().send_object(obj, dst, async_send, int(tag)))

    def recv_object(self, src: int, tag: int = 0) -> Any:  # type: ignore[override]
        """Receive the next object that rank `src` sent to this rank with `tag`."""
        return super().recv_object(src, int(tag))

    def send_tensor_dict(  # type: ignore[override]
        self,
        tensor_dict: Mapping[str, Any],
        dst: int | None = None,
        all_gather_group: GroupCoordinator | None = None,
        async_send: bool = False,
    ) -> list[SglangSend] | dict[str, Any]:
        """Send a tensor dict to rank `dst`, the next one by default.

        Returns:
            With `async_send` the open sends; otherwise an empty list. In a group of one the dict itself.
        """
        if self.world_size == 1:
            return tensor_dict if isinstance(tensor_dict, dict) else dict(tensor_dict)
        if async_send:
            return [SglangSend(each) for each in self.isend_tensor_dict(tensor_dict, dst, all_gather_group)]
        super().send_tensor_dict(tensor_dict, dst, all_gather_group)
        return []

    def recv_tensor_dict(  # type: ignore[override]
        self, src: int | None = None, all_gather_group: GroupCoordinator | None = None
    ) -> dict[Any, Any] | None:
        """Receive a tensor dict from rank `src`, the previous one by default; None in a group of one."""
        return super().recv_tensor_dict(src, all_gather_group)

    def send_recv_tensor_dict(
        self,
        send_tensor_dict: Mapping[str, Any],
        send_dst: int | None = None,
        recv_src: int | None = None,
        send_all_gather_group: GroupCoordinator | None = None,
        recv_all_gather_group: GroupCoordinator | None = None,
    ) -> dict[Any, Any] | None:
        """Send a tensor dict to rank `send_dst`, and receive one from rank `recv_src` meanwhile.

        Returns:
            The received dict, once the sent one may be changed; None in a group of one.
        """
        if self.world_size == 1:
            return None
        sends = self.isend_tensor_dict(send_tensor_dict, send_dst, send_all_gather_group)
        received = self.recv_tensor_dict(recv_src, recv_all_gather_group)
        for send in sends:
            send.wait()
        return received

    # ------------------------------------------------------------------ what SGLang's functions call

    def _all_reduce_in_place(self, input_: torch.Tensor) -> None:
        """Serve SGLang's custom operation `inplace_all_reduce`."""
        self.all_reduce_(input_)

    def _all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:  # noqa: A002
        """Serve SGLang's custom operation `reg_all_gather_into_tensor`."""
        self.all_gather_into_tensor(output, input)

    def _reduce_scatter_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:  # noqa: A002
        """Serve SGLang's custom operation `reg_reduce_scatter_tensor`."""
        self.reduce_scatter_tensor(output, input)

    def _all_to_all_single(self, output: torch.Tensor, input: torch.Tensor) -> None:  # noqa: A002
        """Serve SGLang's custom operation `reg_all_to_all_single`."""
        self.all_to_all_single(output, input)

    def _can_use_flashinfer_allreduce(self, input_: torch.Tensor) -> bool:
        """Return False: this group has no workspace of FlashInfer."""
        del input_
        return False

    def _resolve_outplace_all_reduce_method(self, input_: torch.Tensor) -> None:
        """Return None: SGLang asks which of its communicators would sum this tensor, and there is none."""
        del input_


def _open(sends: Sequence[Any] | None) -> list[SglangSend]:
    return [SglangSend(each.work) for each in sends or ()]
