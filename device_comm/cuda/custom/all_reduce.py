"""Host side of our own collectives on CUDA devices: checks, launches, graph capture, failures and teardown.

The kernels are in `csrc`; their protocol is in `DESIGN.md` under "Custom all-reduce on CUDA". What the host does
about streams, graphs, failures and teardown is there under "Policy and custom all-reduce: host side".
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import torch

from device_comm.cuda.custom.capture_failure import tell_failure
from device_comm.cuda.custom.fused_calls import FUSED_FAMILIES, MOST_ROUTES, NAMES, FusedCalls
from device_comm.cuda.custom.kernel_calls import KernelCalls
from device_comm.cuda.custom.launches import Launch, Launches
from device_comm.cuda.custom.resources import CustomContext, CustomResources, agree_on_policy
from device_comm.cuda.driver import LaunchConfiguration
from device_comm.cuda.policy.decision import CallFacts, Plan, choose
from device_comm.cuda.policy.table import Operation, PolicyTable
from shm_broadcast.errors import CapabilityError, CommError, UsageError
from shm_broadcast.status.kinds import kind_of
from shm_broadcast.status.layout import DONE, FAILED, NOBODY

__all__ = ["CustomAllReduce"]

_ALL_REDUCE: Final = kind_of("all_reduce")
_SIZES: Final = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}


class _Route:
    """How calls of one size and dtype are carried; `function_launch` is None if not by our kernels."""

    __slots__ = ("configuration", "function_launch", "is_pull", "piece")

    def __init__(self, plan: Plan, launch: Launch | None, configuration: LaunchConfiguration | None) -> None:
        self.function_launch = launch
        self.configuration = configuration
        self.piece = plan.piece_bytes
        self.is_pull = plan.algorithm.is_pull


class CustomAllReduce(KernelCalls, FusedCalls):
    """Run all-reduce, reduce-scatter, all-gather and fused calls with our own kernels, for one group.

    Methods take addresses of contiguous memory and the stream to queue on, and return without waiting for the device.
    A method that returns False has queued nothing: the policy chose another algorithm, equally on all ranks (`plan`
    says which and why). Use the object from one thread at a time, like the group.

    *Streams*: two calls in flight at once would share epochs and memory, so calls on different streams run one after
    the other, and so do calls in different branches of one capture. Replays must be ordered with other calls, as with
    any communicator.

    The attributes are those of `FusedCalls` and `KernelCalls`.
    """

    def __init__(self, context: CustomContext, table: PolicyTable, resources: CustomResources) -> None:
        """Use `create`."""
        KernelCalls.__init__(self, context, resources, "custom")
        FusedCalls.__init__(self, resources.facts, table)
        self._peers = context.peers
        self._timeout_s = context.timeout_s
        self._launches: Launches = resources.launches
        self._inputs = resources.inputs
        self._is_dependent = context.settings.dependent_launch
        self._capture_stream: int | None = None
        self._routes: dict[tuple[str, torch.dtype, int, bool], _Route] = {}
        self._reduce_routes: dict[tuple[torch.dtype, int], _Route] = {}
        self._planned = functools.lru_cache(MOST_ROUTES)(self._plan)
        # Saves creating a bound method on each call.
        self._launch = context.driver.launch_configured

    @classmethod
    def create(cls, context: CustomContext) -> CustomAllReduce:
        """Agree on the policy, map every rank's workspace, load a first kernel. Collective.

        *Blocks* as long as the exchanges do. An exchange follows every step that can fail on one rank, so either all
        ranks get the object or all raise.

        Raises:
            SettingsError: This rank's policy file cannot be used.
            DisagreementError: Another rank's policy file cannot be used, or two of them differ.
            CapabilityError: The facts, the memory or the compiler of a rank do not allow it; raised on every rank
                with the same reason. The group is intact and can use NCCL.
        """
        table = agree_on_policy(context)
        return cls(context, table, CustomResources.create(context, table))

    # ------------------------------------------------------------------ the policy

    def plan(
        self, operation: Operation, dtype: torch.dtype, nbytes: int, stream: int, reduction: str = "sum"
    ) -> Plan:
        """Return the algorithm for a call and the reason; equal on all ranks. `nbytes` is that of `CallFacts`."""
        return self._planned(operation, dtype, nbytes, reduction, self._is_captured(stream))

    def _plan(
        self, operation: Operation, dtype: torch.dtype, nbytes: int, reduction: str, in_graph: bool
    ) -> Plan:
        call = CallFacts(
            operation=operation,
            dtype=str(dtype).removeprefix("torch."),
            nbytes=nbytes,
            reduction=reduction,
            in_graph=in_graph,
        )
        return choose(self.facts, call, self.table)

    def _route(self, operation: Operation, dtype: torch.dtype, nbytes: int, stream: int) -> _Route:
        key = (operation, dtype, nbytes, self._is_captured(stream))
        route = self._routes.get(key)
        if route is None:
            plan = self.plan(operation, dtype, nbytes, stream)
            launch = configuration = None
            if plan.algorithm.is_custom:
                # An all-gather moves bytes, so the float32 module serves every dtype.
                name = NAMES.get(dtype, "float32") if operation != "all_gather" else "float32"
                launch = self._loaded(plan.algorithm.value, name, stream, operation)
                configuration = self._configured(launch, stream, plan.grid, plan.threads)
            if len(self._routes) >= MOST_ROUTES:
                self._routes.clear()
                self._reduce_routes.clear()
            route = self._routes[key] = _Route(plan, launch, configuration)
        return route

    def _loaded(self, kernel: str, dtype: str, stream: int, operation: str) -> Launch:
        """Return the launch of a kernel; load it if necessary, while the peers' kernels wait up to the deadline."""
        if self._launches.get(kernel, dtype) is None and self._is_capturing(stream):
            raise UsageError(
                f"{self._health.where(operation)}: a kernel for {dtype} cannot be loaded while stream {stream:#x} is "
                "captured; call begin_capture before the capture, or make one such call"
            )
        try:
            return self._launches.of(kernel, dtype)
        except CommError as error:
            raise self._broken(error, stream) from None

    def _configured(
        self, launch: Launch, stream: int, grid: int, threads: int, cluster: int = 1
    ) -> LaunchConfiguration:
        try:
            return self._driver.configure(
                launch.function, grid, threads, cluster=cluster, is_dependent=self._is_dependent
            )
        except CommError as error:
            raise self._broken(error, stream) from None

    def carries(self, operation: Operation, dtype: torch.dtype, nbytes: int, stream: int) -> bool:
        """Return whether our kernels carry a call, so that a caller can ask before it allocates the result."""
        self.check(operation)
        return self._route(operation, dtype, nbytes, stream).function_launch is not None

    # ------------------------------------------------------------------ calls

    def all_reduce(self, input_: int, output: int, count: int, dtype: torch.dtype, stream: int) -> bool:
        """Sum the ranks' `count` elements at `input_` into `output`, which may be the same address.

        *Collective*, with equal `count` and `dtype`. *Capture*: allowed; after `begin_capture` the input of a pull is
        recorded and must stay allocated as long as the graph. Both addresses are multiples of 16.

        Returns:
            Whether the call was queued; False if the policy chose another algorithm.

        Raises:
            UsageError: The last call was on another stream, which is being captured now, or an address is not a
                multiple of 16. Nothing was queued, the group is intact.
            CudaError: Other code has made the capture of `stream` invalid. Its graph cannot be used, the group is
                intact. Any other error of the driver breaks the group, as peers may have queued the call; one is that
                the stream of the last call was destroyed.
            CommTimeoutError, PeerLostError: A kernel of an earlier call gave up; the group is broken.
        """
        words = self._words
        if words[0] or words[8]:
            raise self._failed("all_reduce")
        if stream != self._order.hot or self._capture_stream is not None:
            self._admit(stream, "all_reduce")
            route = self._route("all_reduce", dtype, count * _SIZES.get(dtype, dtype.itemsize), stream)
        else:
            found = self._reduce_routes.get((dtype, count))
            if found is None:
                found = self._route("all_reduce", dtype, count * dtype.itemsize, stream)
                self._reduce_routes[dtype, count] = found
            route = found
        launch, configuration = route.function_launch, route.configuration
        if launch is None or configuration is None:
            return False
        if (input_ | output) & 15:
            raise self._misaligned("all_reduce", input_, output)
        nbytes = count * _SIZES[dtype]
        if route.is_pull:
            input_ = self._inputs.note(input_, nbytes, output, stream)
        arguments, first = launch.words, launch.first
        # As `_launched`, which would be one more call.
        self._queued += 1
        lane, outcome = self._lane, FAILED
        lane.begin(_ALL_REDUCE, self._queued, nbytes, NOBODY)
        try:
            if nbytes > route.piece and not route.is_pull:
                size = _SIZES[dtype]
                whole = route.piece // size
                for _ in range((nbytes - 1) // route.piece):
                    arguments[first], arguments[first + 1], arguments[first + 2] = input_, output, whole
                    self._launch(configuration, stream, launch.arguments)
                    input_, output, count = input_ + route.piece, output + route.piece, count - whole
            arguments[first] = input_
            arguments[first + 1] = output
            arguments[first + 2] = count
            self._launch(configuration, stream, launch.arguments)
            outcome = DONE
        except CommError as error:
            raise self._broken(error, stream) from None
        finally:
            lane.end(outcome)
        return True

    def reduce_scatter(self, input_: int, output: int, count: int, dtype: torch.dtype, stream: int) -> bool:
        """Sum the ranks' inputs of `world_size` consecutive parts; rank i gets the `count` elements of part i.

        Otherwise like `all_reduce`. `output` may be this rank's own part of the input.
        """
        nbytes = count * dtype.itemsize * self.facts.world_size
        return self._simple("reduce_scatter", input_, output, count, nbytes, dtype, stream)

    def all_gather(self, input_: int, output: int, nbytes: int, stream: int) -> bool:
        """Concatenate the ranks' `nbytes` at `input_` in `output`, in rank order.

        Otherwise like `all_reduce`, but with any alignment; fast if both addresses and `nbytes` are multiples of 16.
        `input_` may be this rank's own part of the output.
        """
        return self._simple("all_gather", input_, output, nbytes, nbytes, torch.uint8, stream)

    def _simple(
        self,
        operation: Operation,
        input_: int,
        output: int,
        count: int,
        nbytes: int,
        dtype: torch.dtype,
        stream: int,
    ) -> bool:
        words = self._words
        if words[0] or words[8]:
            raise self._failed(operation)
        if stream != self._order.hot or self._capture_stream is not None:
            self._admit(stream, operation)
        route = self._routes.get((operation, dtype, nbytes, False)) if self._capture_stream is None else None
        if route is None:
            route = self._route(operation, dtype, nbytes, stream)
        launch, configuration = route.function_launch, route.configuration
        if launch is None or configuration is None:
            return False
        if operation != "all_gather" and (input_ | output) & 15:
            raise self._misaligned(operation, input_, output)
        words, first = launch.words, launch.first
        words[first] = input_
        words[first + 1] = output
        words[first + 2] = count
        self._launched(kind_of(operation), nbytes, configuration, stream, launch.arguments)
        return True

    # ------------------------------------------------------------------ streams

    def _is_captured(self, stream: int) -> bool:
        """Return whether `stream` is captured after `begin_capture`: only then captured inputs can be recorded."""
        return stream == self._capture_stream and self._is_capturing(stream)

    def _admit(self, stream: int, operation: str) -> None:
        """Order a call behind those on other streams."""
        if self._capture_stream is None:
            self._refuse_unfinished(operation)
        self._ordered(stream, operation)

    # ------------------------------------------------------------------ capture

    def begin_capture(self, stream: int, dtypes: Sequence[torch.dtype] = tuple(NAMES)) -> None:
        """Load every kernel that a captured call on `stream` may need. Collective.

        *Blocks* while kernels are compiled (once per machine) and for one exchange. Call it before the capture of
        the stream begins; calls on the stream before that are warm-up and run at once.

        Raises:
            CapabilityError: A kernel cannot be compiled or loaded on some rank; raised on every rank, the group is
                intact.
            UsageError: A capture has begun already or was not finished; the group is intact.
        """
        self._check_open("begin_capture")
        if self._capture_stream is not None:
            raise UsageError(f"{self._health.where('begin_capture')}: a capture has begun already")
        self._refuse_unfinished("begin_capture")
        failure = ""
        try:
            for dtype in dtypes:
                for family in self._families():
                    self._launches.load(family, NAMES[dtype])
            # The float32 module serves all-gathers of every dtype.
            self._launches.load("shards", "float32")
        except CommError as error:
            failure = str(error)
        failed = self._peers.failures(failure)
        if failed:
            raise CapabilityError(
                f"{self._health.where('begin_capture')}: {failed}", requirement="kernels for all ranks"
            )
        self._capture_stream = stream

    def _families(self) -> tuple[str, ...]:
        if self.facts.is_deterministic:
            return ("two_shot", "shards", *FUSED_FAMILIES)
        pulls = ("pull",) if self.facts.is_exportable and self.facts.capacity.pull_two_shot else ()
        multimem = ("multimem",) if self.facts.capacity.multimem_two_shot else ()
        return ("one_shot", "two_shot", "shards", *FUSED_FAMILIES, *pulls, *multimem)

    def end_capture(self) -> None:
        """Stop recording captured inputs. Optional before `finish_capture`. Not collective, idempotent."""
        self._capture_stream = None

    def finish_capture(self) -> None:
        """Send this rank's captured inputs to the other ranks and map theirs. Collective.

        Graphs may be replayed only after this. *Blocks* for two exchanges.

        Raises:
            CapabilityError: A rank could not export or map an input; raised on every rank. Drop the graphs of this
                capture; the group is intact.
            DisagreementError: The ranks captured different calls; raised on every rank, with the same consequence.
        """
        self._check_open("finish_capture")
        self._capture_stream = None
        self._inputs.finish()

    def fail_capture(self, error: Exception) -> None:
        """Tell the other ranks in their `finish_capture` that this rank's capture has failed. Collective with that.

        Their calls raise `CapabilityError`, the group is intact. *Blocks* up to `capture_failure.TELL_WITHIN_S`; if a
        rank has not come by then, the group is broken and the others raise `PeerLostError` with the text of `error`.
        Nothing is told if the group is broken already, as the peers learn that by themselves. Errors are logged, since
        the caller raises `error`.
        """
        self._capture_stream = None
        if self._is_open and not self._health.is_broken:
            tell_failure(self._inputs, self._health, error, self._timeout_s)

    def abandon_capture(self, stream: int | None) -> None:
        """Discard a capture that an exception left, and go back to `stream`. Not collective, idempotent.

        Its graphs must not be replayed. Errors are logged, since the caller raises that exception.
        """
        self._capture_stream = None
        self._inputs.drop()
        super().abandon_capture(stream)

    def _refuse_unfinished(self, operation: str) -> None:
        if self._inputs.pending:
            raise UsageError(
                f"{self._health.where(operation)}: {self._inputs.pending} captured inputs have not been exchanged yet; "
                "call finish_capture first, on all ranks"
            )

    def _misaligned(self, operation: str, *addresses: int) -> UsageError:
        listed = ", ".join(f"{address:#x}" for address in addresses if address & 15)
        return UsageError(
            f"{self._health.where(operation)}: {listed} is no multiple of 16; copy the tensor first (this rank alone "
            "knows its alignment, and the others wait for its call)"
        )
