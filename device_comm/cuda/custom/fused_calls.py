"""Queue all-reduces that do other work in the same kernel: the norms, and the sums of experts."""

from __future__ import annotations

import functools
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec
import torch

from device_comm.cuda.custom.launches import Launch
from device_comm.cuda.custom.streams import StreamOrder
from device_comm.cuda.driver import LaunchConfiguration, PreparedLaunch
from device_comm.cuda.kernel_layout import MAX_BLOCKS, VECTOR_BYTES, blocks_for
from device_comm.cuda.policy.decision import GroupFacts
from device_comm.cuda.policy.finalize import choose_finalize
from device_comm.cuda.policy.norm import NormPlan, choose_norm
from device_comm.cuda.policy.shapes import norm_shape
from device_comm.cuda.policy.table import PolicyTable
from shm_broadcast.errors import CommError, UsageError
from shm_broadcast.status.kinds import kind_of

__all__ = ["FUSED_FAMILIES", "MOST_ROUTES", "NAMES", "FusedCalls", "Scales"]

NAMES: Final = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
"""The dtypes of the kernels, by the names of their modules."""
MOST_ROUTES: Final = 4096
"""Bounds each cache of routes and plans. An engine uses a few dozen combinations of operation, dtype and size."""
FUSED_FAMILIES: Final = ("norm", "norm_fp8", "norm_nvfp4", "finalize")
"""The families of the kernels that are launched here."""

_NORM: Final = kind_of("all_reduce_add_rms_norm")
_FINALIZE: Final = kind_of("moe_finalize_all_reduce")
# Of a block that sums experts without communication: one for each vector.
_FINALIZE_THREADS: Final = 256
_FLOAT_WORD: Final = struct.Struct("<fI")
_WORD: Final = struct.Struct("<Q")


class Scales(NamedTuple):
    """The scales of a quantised norm, by their addresses.

    Attributes:
        output: The format, "fp8" or "nvfp4".
        given: The float32 scale of the tensor; 0 with "fp8" if each row gets one.
        made: What the call writes: with "fp8", unless a scale is given, a float32 for each row; with "nvfp4" an e4m3fn
            for each 16 elements.
    """

    output: str
    given: int
    made: int


class FusedCalls(ABC):
    """The fused calls of a group; a part of `CustomAllReduce`, which describes what its methods have in common.

    Attributes:
        facts: The facts that the policy uses; equal on all ranks.
        table: The policy's thresholds; equal on all ranks.
    """

    _words: Sequence[int]
    _order: StreamOrder
    _capture_stream: int | None
    _launch: Callable[[LaunchConfiguration, int, PreparedLaunch], None]

    def __init__(self, facts: GroupFacts, table: PolicyTable) -> None:
        """Plan nothing yet."""
        self.facts: GroupFacts = facts
        self.table = table
        self._norm_plan = functools.lru_cache(MOST_ROUTES)(self._plan_norm)
        self._finalize_plan = functools.lru_cache(MOST_ROUTES)(self._plan_finalize)
        self._prepared: dict[tuple[NormPlan, torch.dtype], tuple[Launch, LaunchConfiguration]] = {}
        self._eps, self._eps_word = 0.0, 0

    # ------------------------------------------------------------------ norms

    def can_fuse(self, rows: int, hidden: int, dtype: torch.dtype, stream: int) -> bool:
        """Return whether `all_reduce_add_rms_norm` carries a call, with any output; `choose_norm` says when."""
        return self._norm_plan(rows, hidden, dtype, "", self._is_captured(stream)) is not None

    def _plan_norm(
        self, rows: int, hidden: int, dtype: torch.dtype, output: str, in_graph: bool
    ) -> NormPlan | None:
        name = str(dtype).removeprefix("torch.")
        plan = choose_norm(
            self.facts, rows, hidden * dtype.itemsize, name, in_graph=in_graph, table=self.table
        )
        return msgspec.structs.replace(plan, kernel=f"{plan.kernel}_{output}") if plan and output else plan

    def all_reduce_add_rms_norm(
        self,
        addresses: Sequence[int],
        rows: int,
        hidden: int,
        eps: float,
        dtype: torch.dtype,
        stream: int,
        scales: Scales | None = None,
    ) -> bool:
        """Sum the ranks' inputs, add the residual and normalise each row, in one kernel.

        Otherwise like `all_reduce`.

        Args:
            addresses: Addresses of input, residual, weight, output, and output of the sum with the residual. The
                weight has shape [hidden], the others [rows, hidden].
            rows: Number of rows.
            hidden: Elements of a row.
            eps: Added to the mean of the squares.
            dtype: The dtype of all five; with `scales` that of all but the output.
            stream: The stream to queue on.
            scales: Those of a quantised output; the output of the sum must then not be the residual. With "nvfp4" a row
                has a multiple of 16 elements.
        """
        words = self._words
        if words[0] or words[8]:
            raise self._failed("all_reduce_add_rms_norm")
        if stream != self._order.hot or self._capture_stream is not None:
            self._admit(stream, "all_reduce_add_rms_norm")
        plan = self._norm_plan(
            rows, hidden, dtype, scales.output if scales else "", self._is_captured(stream)
        )
        if plan is None:
            return False
        self._norm(plan, addresses, rows, hidden, eps, dtype, stream, scales)
        return True

    def add_rms_norm(
        self,
        addresses: Sequence[int],
        rows: int,
        hidden: int,
        eps: float,
        dtype: torch.dtype,
        stream: int,
        scales: Scales | None = None,
    ) -> None:
        """Add the residual and normalise each row, without communication: the second half of a call that is not fused.

        The arguments are those of `all_reduce_add_rms_norm`. Not collective.
        """
        if self._words[0]:
            raise self._failed("add_rms_norm")
        row_vectors = hidden * dtype.itemsize // VECTOR_BYTES
        grid, threads, cluster = norm_shape(self.facts.arch, self._all_blocks(), max(1, rows), row_vectors)
        kernel = "add_rms_norm" if scales is None else f"add_rms_norm_{scales.output}"
        plan = NormPlan(kernel=kernel, grid=grid, threads=threads, cluster=cluster)
        self._norm(plan, addresses, rows, hidden, eps, dtype, stream, scales)

    def _all_blocks(self) -> int:
        """Return the most blocks of a kernel that waits for nobody: it may fill the device."""
        return max(1, min(self.facts.multiprocessors, MAX_BLOCKS))

    def _norm(
        self,
        plan: NormPlan,
        addresses: Sequence[int],
        rows: int,
        hidden: int,
        eps: float,
        dtype: torch.dtype,
        stream: int,
        scales: Scales | None,
    ) -> None:
        input_, residual, weight, output, total = addresses
        if (input_ | residual | weight | output | total) & 15:
            raise self._misaligned(plan.kernel, *addresses)
        launch, configuration = self._prepare(plan, dtype, stream)
        words, at = launch.words, launch.first
        words[at] = input_
        words[at + 1] = residual
        words[at + 2] = weight
        words[at + 3] = output
        words[at + 4] = total
        words[at + 5] = rows
        words[at + 6] = hidden
        if eps != self._eps:
            (self._eps_word,) = _WORD.unpack(_FLOAT_WORD.pack(eps, 0))
            self._eps = eps
        words[at + 7] = self._eps_word
        if scales is not None:
            words[at + 8], words[at + 9] = scales.given, scales.made
        nbytes = rows * hidden * dtype.itemsize
        self._launched(_NORM, nbytes, configuration, stream, launch.arguments)

    # ------------------------------------------------------------------ sums of experts

    def can_finalize(self, tokens: int, hidden: int, dtype: torch.dtype, stream: int) -> bool:
        """Return whether `moe_finalize_all_reduce` carries a call; `choose_finalize` says when."""
        return self._finalize_plan(tokens, hidden, dtype, self._is_captured(stream)) is not None

    def _plan_finalize(self, tokens: int, hidden: int, dtype: torch.dtype, in_graph: bool) -> NormPlan | None:
        name = str(dtype).removeprefix("torch.")
        return choose_finalize(
            self.facts, tokens, hidden * dtype.itemsize, name, in_graph=in_graph, table=self.table
        )

    def moe_finalize_all_reduce(
        self, addresses: Sequence[int], sizes: tuple[int, int, int, int], dtype: torch.dtype, stream: int
    ) -> bool:
        """Sum each token's experts while the sums are pushed, and sum those over the ranks, in one kernel.

        Otherwise like `all_reduce`; k and n may differ between ranks.

        Args:
            addresses: Addresses of the experts' outputs [n, hidden], their rows [tokens, k] of int32, their weights
                [tokens, k] of float32, an addend [tokens, hidden] or 0, and the output [tokens, hidden], which is none
                of the others.
            sizes: tokens, hidden, k and n.
            dtype: The dtype of the experts' outputs, the addend and the output.
            stream: The stream to queue on.
        """
        words = self._words
        if words[0] or words[8]:
            raise self._failed("moe_finalize_all_reduce")
        if stream != self._order.hot or self._capture_stream is not None:
            self._admit(stream, "moe_finalize_all_reduce")
        plan = self._finalize_plan(sizes[0], sizes[1], dtype, self._is_captured(stream))
        if plan is None:
            return False
        launch, configuration = self._fill_finalize(plan, addresses, sizes, dtype, stream)
        nbytes = sizes[0] * sizes[1] * dtype.itemsize
        self._launched(_FINALIZE, nbytes, configuration, stream, launch.arguments)
        return True

    def moe_finalize(
        self, addresses: Sequence[int], sizes: tuple[int, int, int, int], dtype: torch.dtype, stream: int
    ) -> None:
        """Sum each token's experts without communication: the first half of a call that is not fused.

        The arguments are those of `moe_finalize_all_reduce`. Not collective.
        """
        if self._words[0]:
            raise self._failed("moe_finalize")
        tokens, hidden, *_ = sizes
        vectors = tokens * hidden * dtype.itemsize // VECTOR_BYTES
        grid = blocks_for(vectors, _FINALIZE_THREADS, self._all_blocks())
        plan = NormPlan(kernel="moe_finalize", grid=grid, threads=_FINALIZE_THREADS, cluster=1)
        launch, configuration = self._fill_finalize(plan, addresses, sizes, dtype, stream)
        try:
            self._launch(configuration, stream, launch.arguments)
        except CommError as error:
            raise self._broken(error, stream) from None

    def _fill_finalize(
        self,
        plan: NormPlan,
        addresses: Sequence[int],
        sizes: tuple[int, int, int, int],
        dtype: torch.dtype,
        stream: int,
    ) -> tuple[Launch, LaunchConfiguration]:
        outputs, _, _, addend, result = addresses
        if (outputs | addend | result) & 15:
            raise self._misaligned(plan.kernel, outputs, addend, result)
        launch, configuration = self._prepare(plan, dtype, stream)
        for place, word in enumerate((*addresses, *sizes), launch.first):
            launch.words[place] = word
        return launch, configuration

    # ------------------------------------------------------------------ launches

    def _prepare(self, plan: NormPlan, dtype: torch.dtype, stream: int) -> tuple[Launch, LaunchConfiguration]:
        found = self._prepared.get((plan, dtype))
        if found is None:
            launch = self._loaded(plan.kernel, NAMES[dtype], stream, plan.kernel)
            found = launch, self._configured(launch, stream, plan.grid, plan.threads, plan.cluster)
            if len(self._prepared) >= MOST_ROUTES:
                self._prepared.clear()
            self._prepared[plan, dtype] = found
        return found

    @abstractmethod
    def _admit(self, stream: int, operation: str) -> None:
        """Order a call behind those on other streams."""

    @abstractmethod
    def _is_captured(self, stream: int) -> bool:
        """Return whether `stream` is captured after `begin_capture`."""

    @abstractmethod
    def _loaded(self, kernel: str, dtype: str, stream: int, operation: str) -> Launch:
        """Return the launch of a kernel; load it if necessary."""

    @abstractmethod
    def _configured(
        self, launch: Launch, stream: int, grid: int, threads: int, cluster: int = 1
    ) -> LaunchConfiguration:
        """Return the configuration of a launch."""

    @abstractmethod
    def _launched(
        self,
        kind: int,
        nbytes: int,
        configuration: LaunchConfiguration,
        stream: int,
        arguments: PreparedLaunch,
    ) -> None:
        """Launch the kernel of a call, and show it as one of `kind` to which this rank brings `nbytes`."""

    @abstractmethod
    def _broken(self, error: CommError, stream: int) -> CommError:
        """Break the group, unless an invalid capture of `stream` means that nothing runs; return `error`."""

    @abstractmethod
    def _failed(self, operation: str) -> CommError:
        """Break the group because a kernel gave up; return the error to raise."""

    @abstractmethod
    def _misaligned(self, operation: str, *addresses: int) -> UsageError:
        """Return the error that names the addresses which are no multiple of 16."""
