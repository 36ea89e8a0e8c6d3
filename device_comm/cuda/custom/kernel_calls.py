"""What all calls of our kernels have in common: the order of streams, failures of kernels and driver, the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

from device_comm.cuda.custom.release import CAPTURE_ERRORS
from device_comm.cuda.custom.resources import CustomContext, CustomResources
from device_comm.cuda.custom.streams import StreamOrder
from device_comm.cuda.driver import LaunchConfiguration, PreparedLaunch
from shm_broadcast.errors import ClosedError, CommError, CudaError
from shm_broadcast.status.layout import DONE, FAILED, NOBODY
from shm_broadcast.status.shown_calls import StatusLane

__all__ = ["KernelCalls"]

logger: logging.Logger = logging.getLogger(__name__)

# Interval at which `stop` checks whether queued calls are done.
_FLUSH_PAUSE_S: Final = 0.001

# Replaces the words of the error record after `stop`, so that every call takes its failure branch.
_CLOSED: Final = (1,) * 16


class KernelCalls:
    """The calls of one group that share a workspace, a state and an error record, and so run one after the other.

    Attributes:
        context: The inputs from which it was built.
    """

    def __init__(self, context: CustomContext, resources: CustomResources, plane: str) -> None:
        """Take over `resources`, which `destroy` frees; the status page shows the calls as those of `plane`."""
        self.context: CustomContext = context
        self._driver = context.driver
        self._health = context.health
        self._resources = resources
        self._record = resources.record
        self._words: Sequence[int] = resources.record.words
        self._order = context.order or StreamOrder(context.driver, context.health.where)
        self._is_open = True
        self._is_destroyed = False
        self._was_raised = False
        # Calls are shown until their kernel is queued, with numbers that count those of all ranks alike.
        self._lane: StatusLane = context.health.shown.queued_lane(plane, "our kernels")
        self._queued = 0

    # ------------------------------------------------------------------ streams

    def use_stream(self, stream: int) -> None:
        """Queue later calls on `stream`, behind all work queued so far. Not collective, does not block.

        Raises:
            UsageError: One of the two streams is being captured, so the ordering would become part of the graph.
            CudaError: The driver cannot order the two, as when the stream of the last call was destroyed. No later call
                could be ordered, so the group is broken.
        """
        self._check_open("use_stream")
        try:
            self._order.use(stream)
        except CudaError as error:
            raise self._broken(error, stream) from None

    @property
    def stream(self) -> int | None:
        """Return the stream of the last call that was not captured; None before the first one."""
        return self._order.stream

    def restore_stream(self, stream: int | None) -> None:
        """Undo `use_stream`: go back to `stream`, or to none. Later calls run after all work queued so far.

        Raises:
            CudaError: As `use_stream`.
        """
        if self._is_open:
            try:
                self._order.restore(stream)
            except CudaError as error:
                raise self._broken(error, stream or 0) from None

    def abandon_capture(self, stream: int | None) -> None:
        """Discard a capture that an exception left, and go back to `stream`. Not collective, idempotent.

        Its graphs must not be replayed. Errors are logged, since the caller raises that exception.
        """
        try:
            self.restore_stream(stream)
        except CommError as error:
            self._note("graph_capture", error)

    def _ordered(self, stream: int, operation: str) -> None:
        """Order a call behind those on other streams."""
        try:
            self._order.admit(stream, operation)
        except CudaError as error:
            raise self._broken(error, stream) from None

    # ------------------------------------------------------------------ queueing

    def _launched(
        self,
        kind: int,
        nbytes: int,
        configuration: LaunchConfiguration,
        stream: int,
        arguments: PreparedLaunch,
    ) -> None:
        """Launch the kernel of a call, and show it as one of `kind` to which this rank brings `nbytes`."""
        self._queued += 1
        lane, outcome = self._lane, FAILED
        lane.begin(kind, self._queued, nbytes, NOBODY)
        try:
            self._driver.launch_configured(configuration, stream, arguments)
            outcome = DONE
        except CommError as error:
            raise self._broken(error, stream) from None
        finally:
            lane.end(outcome)

    # ------------------------------------------------------------------ failures

    def check(self, operation: str = "check") -> None:
        """Raise if a kernel has failed. Costs one read of host memory.

        A result is valid once its stream was synchronized and a later `check` did not raise.

        Raises:
            CommTimeoutError, PeerLostError: A kernel of an earlier call gave up; the group is broken.
        """
        # Word 8 does not matter here: the end of a peer does not invalidate results that are complete.
        if self._words[0]:
            raise self._failed(operation)

    def _check_open(self, operation: str) -> None:
        self._health.check_usable(operation)
        self.check(operation)

    def _failed(self, operation: str) -> CommError:
        """Find out why a kernel gave up, break the group, and return the error to raise."""
        if not self._is_open:
            return ClosedError(f"{self._health.where(operation)}: the communicator was destroyed")
        untold = self._resources.take_untold()
        # The watch may have found what a call has raised already. Then `GroupBrokenError` is raised below.
        was_raised, self._was_raised = self._was_raised, True
        if untold is not None and not was_raised:
            return untold
        # The group was closed or broken by something else, which made the kernels leave.
        self._health.check_usable(operation)
        return self._resources.explain(operation)

    def _broken(self, error: CommError, stream: int) -> CommError:
        """Break the group and return `error`: without this rank's call, peers would match its next call with this one.

        If other code has made the capture of `stream` invalid, nothing of that capture will run. Then the
        group stays intact, and `fail_capture` tells the peers.
        """
        if not (isinstance(error, CudaError) and error.code in CAPTURE_ERRORS and self._was_captured(stream)):
            self._health.fail(error)
        return error

    def _was_captured(self, stream: int) -> bool:
        try:
            return self._driver.stream_is_capturing(stream)
        except CudaError:
            return False

    def _is_capturing(self, stream: int) -> bool:
        """Return whether the driver captures `stream`, on which a call is about to be queued."""
        try:
            return self._driver.stream_is_capturing(stream)
        except CudaError as error:
            raise self._broken(error, stream) from None

    # ------------------------------------------------------------------ the end

    def stop(self, timeout_s: float = 5.0) -> None:
        """Refuse later calls, wait up to `timeout_s` for queued ones, then make kernels that still wait leave.

        The first half of `destroy`, for several groups that end together. Not collective, idempotent, legal in any
        state, raises nothing. Later calls raise `ClosedError`.
        """
        if not self._is_open:
            return
        self._is_open = False
        # From now on every call finds nonzero words and raises.
        self._words = _CLOSED
        if not self._health.is_broken and self._record.is_clear:
            self._flush(timeout_s)
        self._order.close()
        self._resources.stop()

    def close_peers(self) -> None:
        """Unmap the peers' memory. Not collective, idempotent, raises nothing; `stop` came before.

        Nothing that this process has queued on the device may be in flight. `destroy` frees the rest.
        """
        if not self._is_destroyed:
            self._resources.close_peers()

    def met(self, ranks: Collection[int]) -> None:
        """Take note that these global ranks have called `close_peers`: `destroy` may free what they had mapped."""
        self._resources.met(ranks)

    def destroy(
        self,
        barrier: Callable[[], None] | None = None,
        timeout_s: float = 5.0,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Wait for queued calls, then free everything. Idempotent, legal in any state, raises nothing.

        *Collective* if `barrier` is given. *Blocks* up to `timeout_s` for queued calls, after which kernels that still
        wait are made to leave, then up to a second for other work on the device, and then for `barrier`. If the other
        work takes longer, the memory is freed behind it, and `barrier` is not called.

        Args:
            barrier: Returns when all ranks have called it; None if the group is broken or peers are out of reach.
                Without it, memory that a living peer may have mapped stays allocated until the process ends.
            timeout_s: How long queued calls may take, in seconds.
            then: Called when everything is freed, perhaps by another thread; it raises nothing.
        """
        if self._is_destroyed:
            return
        self._is_destroyed = True
        self.stop(timeout_s)
        self._resources.destroy(None if self._health.is_broken else barrier, then)

    def _flush(self, timeout_s: float) -> None:
        """Wait until the calls on our stream are done, a kernel fails, or `timeout_s` has passed.

        Other kernels of the group share the order. A failure of theirs shows as a broken group.
        """
        stream, driver = self._order.stream, self._driver
        if stream is None:
            return
        deadline = time.monotonic() + timeout_s
        try:
            event = driver.event_create()
            try:
                driver.event_record(event, stream)
                while (
                    not driver.event_query(event)
                    and time.monotonic() < deadline
                    and not self._record.words[0]
                    and not self._health.is_broken
                ):
                    time.sleep(_FLUSH_PAUSE_S)
            finally:
                driver.event_destroy(event)
        except CommError as error:
            self._note("destroy", error)

    def _note(self, call: str, error: CommError) -> None:
        logger.warning("%s: %s", self._health.where(call), error, extra=self._health.log_fields(call))
