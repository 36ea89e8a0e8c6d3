"""Create and free, in order, the resources of our own collectives: workspaces, kernel state, error record."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection
from typing import ClassVar, Final, Self

import msgspec

from device_comm.cuda.custom.graph_inputs import GraphInputs
from device_comm.cuda.custom.launches import CubinSource, Launches
from device_comm.cuda.custom.multicast import MulticastMemory
from device_comm.cuda.custom.own_stream import own_stream
from device_comm.cuda.custom.peer_memory import PeerMemory, attempt
from device_comm.cuda.custom.peer_messages import MAX_TEXT_CHARS, Kind, PeerExchange
from device_comm.cuda.custom.release import release_together, release_when_idle
from device_comm.cuda.custom.streams import StreamOrder
from device_comm.cuda.driver import Driver
from device_comm.cuda.error_record import DeathWatch, ErrorRecord
from device_comm.cuda.kernel_layout import STATE_BYTES, WorkspaceLayout, largest_input, pack_area, pack_params
from device_comm.cuda.policy.decision import Capacity, GroupFacts, policy_digest, uses_multimem
from device_comm.cuda.policy.file import read_policy_file, table_of
from device_comm.cuda.policy.table import BUILT_IN, PolicyTable
from device_comm.cuda_settings import CudaSettings
from device_comm.health import GroupHealth
from shm_broadcast.errors import CapabilityError, CommError, UsageError

__all__ = ["CustomContext", "CustomResources", "PolicyMessage", "agree_on_policy", "capacity_of"]

logger: logging.Logger = logging.getLogger(__name__)

# Descriptors first: a rank may free that memory while a peer still maps it, so leaving a group needs no round.
_KINDS: Final[tuple[Kind, ...]] = ("vmm", "ipc")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CustomContext:
    """The inputs from which our own collectives are built.

    Attributes:
        driver: This rank's device.
        health: The group's shared state.
        peers: The ranks of the group; also used by captures.
        facts: Facts that all ranks have agreed on; `CustomResources.create` fills in `capacity`.
        settings: Equal on all ranks, except for paths.
        timeout_s: The group's deadline in seconds.
        cubin: Returns compiled kernels.
        order: Orders the calls of the group, by NCCL and all our kernels; by default one of its own.
    """

    driver: Driver
    health: GroupHealth
    peers: PeerExchange
    facts: GroupFacts
    settings: CudaSettings
    timeout_s: float
    cubin: CubinSource
    order: StreamOrder | None = None


def capacity_of(layout: WorkspaceLayout) -> Capacity:
    """Return the largest inputs that fit into workspaces of `layout`, in the policy's bytes."""
    limits = {name: largest_input(name, layout) for name in Capacity.__struct_fields__}
    # The kernel counts the bytes of its output, the policy those of the input.
    limits["push_reduce_scatter"] *= layout.world_size
    return Capacity(**limits)


class PolicyMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The policy of one rank: the digest of its table and its facts as JSON, or why its file cannot be used."""

    failure: str = ""
    origin: str = ""
    digest: str = ""
    facts: str = ""


def agree_on_policy(context: CustomContext) -> PolicyTable:
    """Return the policy table after checking that all ranks have equal tables and equal facts. Collective.

    Raises:
        SettingsError: This rank's policy file cannot be used.
        DisagreementError: Another rank's file cannot be used, or two ranks would decide differently.
    """
    table, trouble = BUILT_IN, None
    path = context.settings.policy_file
    try:
        if path is not None:
            table = table_of(read_policy_file(path), context.facts, path)
    except CommError as error:
        trouble = error
    own = PolicyMessage(
        "" if trouble is None else str(trouble)[:MAX_TEXT_CHARS],
        table.origin[:MAX_TEXT_CHARS],
        policy_digest(table),
        msgspec.json.encode(context.facts, order="deterministic").decode(),
    )
    messages = context.peers.gather(own)
    if trouble is not None:
        raise trouble
    if any(each.failure or (each.digest, each.facts) != (own.digest, own.facts) for each in messages):
        raise context.peers.disagreement(
            f"{context.health.where('custom all-reduce')}: ranks would choose their algorithms differently",
            [each.failure or f"{each.origin}, digest {each.digest}, facts {each.facts}" for each in messages],
        )
    return table


class CustomResources:
    """All resources of one group on this rank for our own collectives. Made by `create`, freed by `destroy`.

    Attributes:
        facts: The group's facts, with the capacity of the workspaces.
        record: The error record that kernels report to.
        launches: The kernels, ready to launch.
        inputs: The inputs of captured pulls.
        purpose: What the resources are for, in the text of an error.
    """

    purpose: ClassVar[str] = "custom all-reduce"
    launches: Launches
    inputs: GraphInputs
    record: ErrorRecord

    def __init__(self, context: CustomContext, facts: GroupFacts, memory: PeerMemory) -> None:
        """Use `create`."""
        self.facts: GroupFacts = facts
        self._driver = context.driver
        self._health = context.health
        self._ranks = context.peers.ranks
        self._memory = memory
        self._multicast: MulticastMemory | None = None
        self._within_s = context.settings.deadline_s or context.timeout_s
        self._watch: DeathWatch | None = None
        self._untold: CommError | None = None
        # Functions that free the rest, in the order of creation; they are called in reverse.
        self._undo: list[Callable[[], None]] = []

    @staticmethod
    def layout_of(context: CustomContext) -> WorkspaceLayout:
        """Return the layout of the workspaces; equal on all ranks."""
        settings = context.settings
        return WorkspaceLayout(len(context.peers.ranks), settings.arena_bytes, settings.staging_bytes)

    @classmethod
    def create(cls, context: CustomContext, table: PolicyTable | None = None) -> Self:
        """Create all resources that calls by `table` may need. Collective; either all ranks succeed or all raise.

        Without a table, or without memory behind a multimem address, the ranks go on as if no device had multicast.

        Raises:
            CapabilityError: Some rank failed; raised on every rank with the same reason.
        """
        peers, health = context.peers, context.health
        layout = cls.layout_of(context)
        facts = msgspec.structs.replace(context.facts, capacity=capacity_of(layout))
        # Raises on all ranks or on none.
        memory = PeerMemory.create(
            *(context.driver, peers, layout.total_bytes, health.lost),
            kinds=_KINDS,
            timeout_s=context.timeout_s,
        )
        made = cls(context, facts, memory)
        try:
            if table is not None:
                made._share_multicast(context, layout, table)
            failure = ""
            try:
                made._initialise(context, layout)
            except CommError as error:
                failure = str(error)
            # Also a barrier: no rank pushes into an arena before its owner has filled it with sentinels.
            failed = peers.failures(failure)
        except BaseException:
            made._give_up(None)
            raise
        if failed:
            made._give_up(peers)
            raise CapabilityError(
                f"{health.where(cls.purpose)}: {failed}",
                requirement="kernels and memory on all ranks",
            )
        made._watch = DeathWatch(made.record, health, made._kernel_failed)
        health.on_abort(made._on_abort)
        return made

    def _share_multicast(self, context: CustomContext, layout: WorkspaceLayout, table: PolicyTable) -> None:
        """Make the memory behind a multimem address if it may be used; else set its capacity to 0. Collective."""
        why = ""
        if layout.staging_bytes and uses_multimem(self.facts, table):
            self._multicast, why = MulticastMemory.create(
                *(context.driver, context.peers, layout.staging_bytes, self._health.lost),
                timeout_s=context.timeout_s,
            )
        if self._multicast is None:
            capacity = msgspec.structs.replace(self.facts.capacity, multimem_two_shot=0, multimem_one_shot=0)
            self.facts = msgspec.structs.replace(self.facts, has_multicast=False, capacity=capacity)
        if why:
            call = "custom all-reduce"
            fields = self._health.log_fields(call)
            logger.warning("%s: no multimem: %s", self._health.where(call), why, extra=fields)

    def _initialise(self, context: CustomContext, layout: WorkspaceLayout) -> None:
        memory, driver, rank = self._memory, self._driver, context.peers.rank
        self.record = ErrorRecord(driver)
        self._undo.append(self.record.free)
        state = driver.mem_alloc(STATE_BYTES)
        self._undo.append(lambda: driver.mem_free(state))
        with own_stream(driver) as stream:
            driver.memset_d32(state, 0, STATE_BYTES // 4, stream)
            for offset, value, words in layout.initial_words:
                driver.memset_d32(memory.addresses[rank] + offset, value, words, stream)
        params = pack_params(
            layout,
            workspaces=memory.addresses,
            state=state,
            error=self.record.device_address,
            deadline_ns=int(self._within_s * 1e9),
            rank=rank,
        )
        self._load(context, layout, params)

    def _load(self, context: CustomContext, layout: WorkspaceLayout, params: bytes) -> None:
        """Prepare what needs the kernels' `params`, and load one module."""
        driver, memory, multicast = self._driver, self._memory, self._multicast
        area = b"" if multicast is None else pack_area(multicast.own, multicast.everywhere)
        self.launches = Launches(driver, context.cubin, params, area)
        self._undo.append(self.launches.unload)
        self.inputs = GraphInputs(driver, memory, context.peers, layout.staging_offset, self._health.where)
        self._undo.append(self.inputs.free)
        # Loading one module now shows whether the compiler supports the device.
        self.launches.load("two_shot" if self.facts.is_deterministic else "one_shot", "bfloat16")

    def _on_abort(self) -> None:
        # A group that is closed without a failure lets queued calls finish; `destroy` ends the kernels.
        if self._health.is_broken:
            self.record.abort()

    def _kernel_failed(self) -> None:
        self._untold = self.explain("a queued call")

    def take_untold(self) -> CommError | None:
        """Return, once, the error that the watch found between two calls; the next call raises it."""
        untold, self._untold = self._untold, None
        return untold

    def explain(self, operation: str) -> CommError:
        """Return the error to raise after a kernel gave up, and break the group."""
        failure = self.record.failure()
        if failure is not None and failure.reason == "unregistered":
            error = UsageError(
                f"{self._health.where(operation)}: a CUDA graph was replayed before finish_capture had exchanged its "
                f"inputs ({failure.kernel}); the group is now unusable, destroy it"
            )
            self._health.fail(error)
            return error
        if failure is not None and failure.reason == "overflow":
            error = UsageError(
                f"{self._health.where(operation)}: more rows came to {failure.kernel} than its max_rows: not all of "
                f"those from ranks {[self._ranks[rank] for rank in failure.missing]} did fit; the group is now "
                "unusable, destroy it"
            )
            self._health.fail(error)
            return error
        if failure is None:
            # The watch saw a process end before any kernel gave up.
            return self._health.blame(operation, (), 0.0)
        missing = [self._ranks[rank] for rank in failure.missing]
        return self._health.blame(f"{operation} ({failure.kernel})", missing, self._within_s)

    def stop(self) -> None:
        """Make every kernel of this group leave, now and later. Idempotent; raises nothing."""
        if self._watch is not None:
            self._watch.stop()
        if hasattr(self, "record"):
            self.record.abort()

    def close_peers(self) -> None:
        """Unmap the peers' memory; `destroy` frees the rest. Idempotent; raises nothing.

        Nothing that this process has queued on the device may be in flight.
        """
        self.stop()
        self._memory.close_peers()

    def met(self, ranks: Collection[int]) -> None:
        """Take note that these global ranks have called `close_peers`."""
        self._memory.met(ranks)

    def destroy(
        self,
        barrier: Callable[[], None] | None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """End the kernels, unmap the peers' memory, call `barrier`, free our memory, in this order. Raises nothing.

        *Blocks* for about a second at most, apart from `barrier`: see `release_when_idle`. If that takes longer,
        `barrier` is not called.

        Args:
            barrier: Returns when all ranks have called it, or None.
            then: Called at the end; it raises nothing.
        """
        self.stop()

        def release(is_awaited: bool) -> None:
            gave_up = self._health.is_broken or (hasattr(self, "record") and self.record.words[0] != 0)
            # A peer that has let go of our memory has no kernel left that could be between its barriers.
            is_quiet = not gave_up or self._memory.is_left
            self._free(barrier if is_awaited else None, is_quiet=is_quiet)
            if then is not None:
                then()

        where, fields = self._health.where("destroy"), self._health.log_fields("destroy")
        release_when_idle(self._driver, where, fields, release)

    def _give_up(self, peers: PeerExchange | None) -> None:
        """Free what `create` has made and no kernel has used. Collective with `peers`; without, a rank was lost."""
        self.stop()
        where, fields = self._health.where(self.purpose), self._health.log_fields(self.purpose)
        if peers is None:
            release_when_idle(
                self._driver, where, fields, lambda _is_awaited: self._free(None, is_quiet=True)
            )
        else:
            release_together(
                *(self._driver, where, fields, peers),
                lambda is_together: self._free(peers.meet if is_together else None, is_quiet=True),
            )

    def _free(self, barrier: Callable[[], None] | None, *, is_quiet: bool) -> None:
        """Unmap the peers' memory, call `barrier`, free our memory; `is_quiet` as in `MulticastMemory.close`."""
        trouble: list[str] = []
        if self._multicast is not None:
            self._multicast.close(is_quiet=is_quiet)
        self._memory.close(barrier)
        while self._undo:
            attempt(trouble, self._undo.pop())
        if trouble:
            fields = self._health.log_fields("destroy")
            logger.warning("%s: %s", self._health.where("destroy"), "; ".join(trouble), extra=fields)
