"""Host side of the expert-parallel kernels: what they carry, arguments and launches.

The protocol is in `DESIGN.md` under "Expert parallel on CUDA".
"""

from __future__ import annotations

import array
import functools
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

import torch

from device_comm.cuda.alignment import aligned
from device_comm.cuda.custom.fused_calls import NAMES
from device_comm.cuda.custom.kernel_calls import KernelCalls
from device_comm.cuda.custom.launches import CubinSource
from device_comm.cuda.custom.resources import CustomContext, CustomResources
from device_comm.cuda.driver import Driver, LaunchConfiguration, PreparedLaunch
from device_comm.cuda.expert_layout import (
    MOST_COLUMNS,
    CombineCall,
    DispatchCall,
    DispatchSlots,
    combine_slot_bytes,
    unit_of,
)
from device_comm.cuda.kernel_layout import WorkspaceLayout
from device_comm.cuda.kernels import FAMILIES
from device_comm.cuda.policy.shapes import most_blocks
from device_comm.experts.exchange import ExchangedRows, ExchangeRequest
from device_comm.process_group import dense
from shm_broadcast.errors import CommError, UsageError
from shm_broadcast.status.kinds import kind_of

__all__ = ["ExpertKernels"]

_DISPATCH: Final = kind_of("dispatch")
_COMBINE: Final = kind_of("combine")

# A dispatch moves bytes, so one module serves every dtype.
_DISPATCH_DTYPE: Final = "bfloat16"
_ID_DTYPES: Final = (torch.int32, torch.int64)
_FAMILY: Final = "expert"
_THREADS: Final = 512
# Bounds the packed arguments, one for each shape of call. An engine uses one for each captured batch size.
_MOST_SHAPES: Final = 1024
# A kernel numbers the units of a call with 32 bits, and adds the number of threads to them.
_MOST_UNITS: Final = 2**31


class _ExpertResources(CustomResources):
    """Workspace, state, error record and kernels of one group's exchanges on this rank."""

    purpose: ClassVar[str] = "expert parallel"
    modules: ExpertModules

    @staticmethod
    def layout_of(context: CustomContext) -> WorkspaceLayout:
        """Return the layout of the workspaces; equal on all ranks."""
        return WorkspaceLayout(len(context.peers.ranks), context.settings.expert_arena_bytes)

    def _load(self, context: CustomContext, layout: WorkspaceLayout, params: bytes) -> None:
        del layout
        # One grid for all calls: each flag is then written by each launch of its phase. All blocks wait for peers.
        grid = most_blocks(context.facts.multiprocessors)
        self.modules = ExpertModules(context, params, grid)
        self._undo.append(self.modules.unload)
        self.modules.load(_DISPATCH_DTYPE)


class ExpertModules:
    """The modules of the kernels, and their arguments, packed once for each shape of call."""

    def __init__(self, context: CustomContext, params: bytes, grid: int) -> None:
        """Load nothing yet; launches of `params` will have `grid` blocks."""
        self._driver: Driver = context.driver
        self._cubin: CubinSource = context.cubin
        self._is_dependent = context.settings.dependent_launch
        self._params = params
        self._grid = grid
        self._modules: dict[str, int] = {}
        self._configurations: dict[tuple[str, str], LaunchConfiguration] = {}
        self._packed: dict[DispatchCall | CombineCall, PreparedLaunch] = {}

    def load(self, dtype: str) -> None:
        """Compile or read the module for `dtype` and load it. Not allowed during capture."""
        if dtype not in self._modules:
            module = self._modules[dtype] = self._driver.module_load(self._cubin(_FAMILY, dtype))
            for kernel in FAMILIES[_FAMILY]:
                function = self._driver.module_function(module, kernel)
                self._configurations[kernel, dtype] = self._driver.configure(
                    function, self._grid, _THREADS, is_dependent=self._is_dependent
                )

    def get(self, kernel: str, dtype: str) -> LaunchConfiguration | None:
        """Return how a kernel is launched, or None if its module is not loaded."""
        return self._configurations.get((kernel, dtype))

    def of(self, kernel: str, dtype: str) -> LaunchConfiguration:
        """Return how a kernel is launched; load its module if necessary."""
        if (kernel, dtype) not in self._configurations:
            self.load(dtype)
        return self._configurations[kernel, dtype]

    def packed(self, call: DispatchCall | CombineCall) -> PreparedLaunch:
        """Return the arguments of calls of this shape; `call.fill` writes the rest."""
        found = self._packed.get(call)
        if found is None:
            if len(self._packed) >= _MOST_SHAPES:
                self._packed.clear()
            words = array.array("Q", call.words()).tobytes()
            found = self._packed[call] = PreparedLaunch([self._params, words])
        return found

    def unload(self) -> None:
        """Unload all modules. Idempotent."""
        self._configurations.clear()
        self._packed.clear()
        while self._modules:
            self._driver.module_unload(self._modules.popitem()[1])


class ExpertKernels(KernelCalls):
    """Dispatch and combine rows with our kernels, for one group. Implements `ExpertExchange`.

    Calls are queued on the caller's current stream and never wait for the device. Calls on different streams run one
    after the other, and so do these and the other calls of the group. Use the object from one thread at a time, like
    the group.

    Attributes:
        arena_bytes: Bytes that the slots of one call may take on a rank; equal on all ranks.
        Others: As `KernelCalls`.
    """

    def __init__(
        self, context: CustomContext, resources: _ExpertResources, stream: Callable[[], int]
    ) -> None:
        """Use `create`."""
        super().__init__(context, resources, "experts")
        self.arena_bytes: int = context.settings.expert_arena_bytes
        self._ranks = len(context.peers.ranks)
        self._modules = resources.modules
        self._stream = stream
        self._planned = functools.lru_cache(_MOST_SHAPES)(self._plan)

    @classmethod
    def create(cls, context: CustomContext, stream: Callable[[], int]) -> ExpertKernels:
        """Map every rank's workspace and load the kernels. Collective.

        *Blocks* as long as the exchanges do.

        Args:
            context: As for `CustomAllReduce`; the facts must hold the smallest number of multiprocessors.
            stream: Returns the current stream.

        Raises:
            CapabilityError: The memory or the compiler of a rank does not allow it; raised on every rank with the same
                reason. The group is intact.
        """
        return cls(context, _ExpertResources.create(context), stream)

    # ------------------------------------------------------------------ what is carried

    def why_not(self, request: ExchangeRequest) -> str:
        """Return why a dispatch is not carried, or "". A pure function of what all ranks share."""
        return self._planned(request)[0]

    def _plan(self, request: ExchangeRequest) -> tuple[str, DispatchCall | None]:
        if request.id_dtype not in _ID_DTYPES:
            return f"the kernels take ids of int32 and int64, not {request.id_dtype}", None
        if len(request.row_bytes) > MOST_COLUMNS:
            return f"the kernels move {MOST_COLUMNS} tensors, not {len(request.row_bytes)}", None
        hidden, *others = request.row_bytes
        if unit_of(hidden) != 16:
            return f"rows of hidden states must be a multiple of 16 bytes, not {hidden}", None
        odd = [nbytes for nbytes in others if not unit_of(nbytes)]
        if odd:
            return f"rows of further tensors must be a multiple of 4 bytes, not {odd[0]}", None
        slots = DispatchSlots.of(request.capacity, request.topk, request.row_bytes)
        needed = slots.slot_bytes * self._ranks
        if needed > self.arena_bytes:
            return f"its slots take {needed} bytes, cuda.expert_arena_bytes is {self.arena_bytes}", None
        rows = self._ranks * request.capacity if request.max_rows is None else request.max_rows
        if rows * max(*request.row_bytes, 4 * request.topk) // 4 >= _MOST_UNITS:
            return f"{rows} rows are too many for one call", None
        call = DispatchCall(
            slots=slots,
            row_bytes=request.row_bytes,
            topk=request.topk,
            experts=request.experts,
            capacity=request.capacity,
            rows=rows,
            id_bytes=request.id_dtype.itemsize,
            is_compact=request.max_rows is not None,
        )
        return "", call

    # ------------------------------------------------------------------ calls

    def dispatch(
        self,
        request: ExchangeRequest,
        tensors: Sequence[torch.Tensor],
        ids: torch.Tensor,
        owners: torch.Tensor,
        local: torch.Tensor,
    ) -> ExchangedRows:
        """Send rows to the ranks of their experts; see `ExpertExchange`.

        Raises:
            UsageError: The request is not carried, or a stream cannot be ordered. Nothing was queued, the group is
                intact.
            CudaError: Other code has made the capture of the current stream invalid: its graph cannot be used, the
                group is intact. Any other error of the driver breaks the group, as peers may have queued the call.
            CommTimeoutError, PeerLostError: A kernel of an earlier call gave up; the group is broken.
            ClosedError: The communicator was destroyed.
        """
        trouble, call = self._planned(request)
        if call is None:
            raise UsageError(f"{self._health.where('dispatch')}: {trouble}")
        stream = self._admit("dispatch")
        configuration = self._loaded("expert_dispatch", _DISPATCH_DTYPE, stream)
        sources = [aligned(dense(each), unit_of(n)) for each, n in zip(tensors, call.row_bytes, strict=True)]
        ids = dense(ids)
        outputs = [each.new_empty((call.rows, *each.shape[1:])) for each in sources]
        tokens, device = ids.shape[0], ids.device
        rows = ExchangedRows(
            request=request,
            tensors=outputs,
            topk_ids=ids.new_empty((call.rows, call.topk)),
            local_ids=torch.empty((call.rows, call.topk), dtype=torch.int64, device=device),
            received=torch.empty(self._ranks + 1, dtype=torch.int32, device=device),
            places=torch.empty((tokens, self._ranks), dtype=torch.int32, device=device),
            lost=torch.empty(tokens, dtype=torch.bool, device=device),
        )
        addresses = (ids, rows.topk_ids, rows.local_ids, owners, local, rows.places, rows.lost, rows.received)
        arguments = self._modules.packed(call)
        call.fill(
            arguments.words,
            arguments.word_of[1],
            [each.data_ptr() for each in sources],
            [each.data_ptr() for each in outputs],
            [each.data_ptr() for each in addresses],
            tokens,
        )
        nbytes = sum(each.nbytes for each in sources)
        self._launched(_DISPATCH, nbytes, configuration, stream, arguments)
        return rows

    def combine(
        self, results: torch.Tensor, weights: torch.Tensor | None, rows: ExchangedRows
    ) -> torch.Tensor:
        """Return results to the ranks of their tokens and sum them; see `ExpertExchange`.

        Raises:
            UsageError: The dtype is none that the kernels sum, a row is no multiple of 16 bytes or does not fit into
                the arena, or the module is not loaded during a capture. Nothing was queued, the group is intact.
            Others: As `dispatch`.
        """
        hidden, tokens = results.shape[-1], rows.places.shape[0]
        call = self._combine_call(results.dtype, hidden, rows.request)
        if tokens * call.row_bytes // 16 >= _MOST_UNITS:
            raise UsageError(f"{self._health.where('combine')}: {tokens} tokens are too many for one call")
        stream = self._admit("combine")
        configuration = self._loaded("expert_combine", NAMES[results.dtype], stream)
        source = aligned(dense(results))
        output = source.new_empty((tokens, hidden))
        factors = None if weights is None else dense(weights.to(torch.float32))
        addresses = (rows.local_ids, rows.received, rows.places, rows.lost, output)
        arguments = self._modules.packed(call)
        first = (source.data_ptr(), 0 if factors is None else factors.data_ptr())
        call.fill(
            arguments.words,
            arguments.word_of[1],
            [*first, *(each.data_ptr() for each in addresses)],
            tokens,
        )
        self._launched(_COMBINE, source.nbytes, configuration, stream, arguments)
        return output

    def _combine_call(self, dtype: torch.dtype, hidden: int, request: ExchangeRequest) -> CombineCall:
        nbytes = hidden * dtype.itemsize
        slot = combine_slot_bytes(request.capacity, nbytes)
        trouble = ""
        if dtype not in NAMES:
            trouble = f"results must be float32, float16 or bfloat16, not {dtype}"
        elif not nbytes or nbytes % 16:
            trouble = f"rows of results must be a multiple of 16 bytes, not {nbytes}"
        elif slot * self._ranks > self.arena_bytes:
            trouble = (
                f"its slots take {slot * self._ranks} bytes, cuda.expert_arena_bytes is {self.arena_bytes}"
            )
        if trouble:
            raise UsageError(
                f"{self._health.where('combine')}: our kernels dispatched these rows, and {trouble}"
            )
        return CombineCall(
            slot_bytes=slot,
            row_bytes=nbytes,
            topk=request.topk,
            capacity=request.capacity,
            rows=self._ranks * request.capacity if request.max_rows is None else request.max_rows,
            is_compact=request.max_rows is not None,
        )

    def _admit(self, operation: str) -> int:
        """Raise if a kernel has failed; order a call behind those on other streams, and return its stream."""
        words = self._words
        if words[0] or words[8]:
            raise self._failed(operation)
        stream = self._stream()
        if stream != self._order.hot:
            self._ordered(stream, operation)
        return stream

    def _loaded(self, kernel: str, dtype: str, stream: int) -> LaunchConfiguration:
        """Return how a kernel is launched; load it if necessary, while the peers' kernels wait up to the deadline."""
        if self._modules.get(kernel, dtype) is None and self._is_capturing(stream):
            where = self._health.where(kernel.removeprefix("expert_"))
            raise UsageError(
                f"{where}: a kernel for {dtype} cannot be loaded while stream {stream:#x} is captured; make one such "
                "call before"
            )
        try:
            return self._modules.of(kernel, dtype)
        except CommError as error:
            raise self._broken(error, stream) from None
