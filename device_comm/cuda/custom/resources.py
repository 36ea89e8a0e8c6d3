"""Create and free, in order, the resources of our own collectives: workspaces, kernel state, error record."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from device_comm.cuda.custom.graph_inputs import GraphInputs
from device_comm.cuda.custom.launches import CubinSource, Launches
from device_comm.cuda.custom.peer_memory import PeerMemory, attempt
from device_comm.cuda.custom.peer_messages import MAX_TEXT_CHARS, Exchange, Kind, exchange_failure, speak
from device_comm.cuda.driver import Driver
from device_comm.cuda.error_record import DeathWatch, ErrorRecord
from device_comm.cuda.kernel_layout import STATE_BYTES, WorkspaceLayout, largest_input, pack_params
from device_comm.cuda.policy.decision import Capacity, GroupFacts, policy_digest
from device_comm.cuda.policy.file import read_policy_file, table_of
from device_comm.cuda.policy.table import BUILT_IN, PolicyTable
from device_comm.cuda_settings import CudaSettings
from device_comm.health import GroupHealth
from shm_broadcast.errors import CapabilityError, CommError, DisagreementError, UsageError

__all__ = ["CustomResources", "PolicyMessage", "agree_on_policy", "capacity_of"]

logger: logging.Logger = logging.getLogger(__name__)

# Descriptors first: a rank may free that memory while a peer still maps it, so leaving a group needs no round.
_KINDS: Final[tuple[Kind, ...]] = ("vmm", "ipc")


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


def agree_on_policy(
    settings: CudaSettings,
    facts: GroupFacts,
    ranks: Sequence[int],
    exchange: Exchange,
    where: Callable[[str], str],
) -> PolicyTable:
    """Return the policy table after checking that all ranks have equal tables and equal facts. Collective.

    Raises:
        SettingsError: This rank's policy file cannot be used.
        DisagreementError: Another rank's file cannot be used, or two ranks would decide differently.
    """
    table, trouble = BUILT_IN, None
    try:
        if settings.policy_file is not None:
            table = table_of(read_policy_file(settings.policy_file), facts, settings.policy_file)
    except CommError as error:
        trouble = error
    own = PolicyMessage(
        "" if trouble is None else str(trouble)[:MAX_TEXT_CHARS],
        table.origin[:MAX_TEXT_CHARS],
        policy_digest(table),
        msgspec.json.encode(facts, order="deterministic").decode(),
    )
    messages = speak(exchange, own, ranks)
    if trouble is not None:
        raise trouble
    differs = any(each.failure or (each.digest, each.facts) != (own.digest, own.facts) for each in messages)
    if differs:
        views = {
            rank: each.failure or f"{each.origin}, digest {each.digest}, facts {each.facts}"
            for rank, each in zip(ranks, messages, strict=True)
        }
        listed = "; ".join(f"rank {rank}: {view}" for rank, view in views.items())
        raise DisagreementError(
            f"{where('custom all-reduce')}: ranks would choose their algorithms differently: {listed}",
            views=views,
        )
    return table


class CustomResources:
    """All resources of one group on this rank for our own collectives. Made by `create`, freed by `destroy`.

    Attributes:
        facts: The group's facts, with the capacity of the workspaces.
        record: The error record that kernels report to.
        launches: The kernels, ready to launch.
        inputs: The inputs of captured pulls.
    """

    facts: GroupFacts
    launches: Launches
    inputs: GraphInputs
    record: ErrorRecord

    def __init__(self, driver: Driver, health: GroupHealth, rank_in_group: int, ranks: Sequence[int]) -> None:
        """Use `create`."""
        self._driver = driver
        self._health = health
        self._rank = rank_in_group
        self._ranks = tuple(ranks)
        self._memory: PeerMemory | None = None
        self._state = 0
        self._watch: DeathWatch | None = None
        self._untold: CommError | None = None
        self._within_s = 0.0

    @classmethod
    def create(
        cls,
        *,
        driver: Driver,
        health: GroupHealth,
        rank_in_group: int,
        ranks: Sequence[int],
        exchange: Exchange,
        facts: GroupFacts,
        settings: CudaSettings,
        timeout_s: float,
        cubin: CubinSource,
    ) -> CustomResources:
        """Create all resources. Collective; either all ranks succeed or all raise.

        Raises:
            CapabilityError: Some rank failed; raised on every rank with the same reason.
        """
        layout = WorkspaceLayout(len(ranks), settings.arena_bytes, settings.staging_bytes)
        made = cls(driver, health, rank_in_group, ranks)
        made.facts = msgspec.structs.replace(facts, capacity=capacity_of(layout))
        made._within_s = settings.deadline_s or timeout_s
        # Raises on all ranks or on none.
        made._memory = PeerMemory.create(
            *(driver, rank_in_group, ranks, layout.total_bytes, exchange),
            kinds=_KINDS,
            timeout_s=timeout_s,
        )
        failure = ""
        try:
            made._initialise(layout, cubin)
        except CommError as error:
            failure = str(error)
        except BaseException:
            made.destroy(None)
            raise
        try:
            # Also a barrier: no rank pushes into an arena before its owner has filled it with sentinels.
            failed = exchange_failure(exchange, failure, ranks)
        except BaseException:
            made.destroy(None)
            raise
        if failed:
            made.destroy(lambda: _synchronize(exchange, ranks))
            raise CapabilityError(
                f"{health.where('custom all-reduce')}: {failed}",
                requirement="kernels and memory on all ranks",
            )
        made._watch = DeathWatch(made.record, health, made._kernel_failed)
        health.on_abort(made._on_abort)
        return made

    def _initialise(self, layout: WorkspaceLayout, cubin: CubinSource) -> None:
        memory, driver = self._memory, self._driver
        if memory is None:
            return
        self.record = ErrorRecord(driver)
        self._state = driver.mem_alloc(STATE_BYTES)
        driver.memcpy_htod(self._state, bytes(STATE_BYTES))
        stream = driver.stream_create()
        try:
            for offset, value, words in layout.initial_words:
                driver.memset_d32(memory.addresses[self._rank] + offset, value, words, stream)
            driver.stream_synchronize(stream)
        finally:
            driver.stream_destroy(stream)
        params = pack_params(
            layout,
            workspaces=memory.addresses,
            state=self._state,
            error=self.record.device_address,
            deadline_ns=int(self._within_s * 1e9),
            rank=self._rank,
        )
        self.launches = Launches(driver, cubin, params)
        self.inputs = GraphInputs(
            driver, memory, self._rank, self._ranks, layout.staging_offset, self._health.where
        )
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
        if failure is None:
            # The watch saw a process end before any kernel gave up.
            return self._health.blame(operation, (), 0.0)
        missing = [self._ranks[rank] for rank in failure.missing]
        return self._health.blame(f"{operation} ({failure.kernel})", missing, self._within_s)

    def destroy(self, barrier: Callable[[], None] | None) -> None:
        """End the kernels, unmap the peers' memory, call `barrier`, free our memory, in this order. Raises nothing."""
        trouble: list[str] = []
        if self._watch is not None:
            self._watch.stop()
        record = getattr(self, "record", None)
        if record is not None:
            record.abort()
        inputs: GraphInputs | None = getattr(self, "inputs", None)
        attempt(trouble, self._driver.context_synchronize)
        if self._memory is not None:
            self._memory.close(barrier, self._health.lost)
        if inputs is not None:
            attempt(trouble, inputs.free)
        launches: Launches | None = getattr(self, "launches", None)
        if launches is not None:
            attempt(trouble, launches.unload)
        state, self._state = self._state, 0
        if state:
            attempt(trouble, self._driver.mem_free, state)
        if record is not None:
            attempt(trouble, record.free)
        if trouble:
            logger.warning("%s: %s", self._health.where("destroy"), "; ".join(trouble))


def _synchronize(exchange: Exchange, ranks: Sequence[int]) -> None:
    exchange_failure(exchange, "", ranks)
