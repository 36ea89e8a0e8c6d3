"""Tell the other ranks that this rank's graph capture has failed, or break the group if they do not come to hear it."""

from __future__ import annotations

import logging
import threading
from typing import Final

from device_comm.cuda.custom.graph_inputs import GraphInputs
from device_comm.cuda.custom.peer_messages import MAX_TEXT_CHARS
from device_comm.health import GroupHealth
from shm_broadcast.errors import CapabilityError, DisagreementError
from shm_broadcast.interruption import raised_by_handler
from shm_broadcast.reports.failure_record import FailureRecord

__all__ = ["TELL_WITHIN_S", "tell_failure"]

logger: logging.Logger = logging.getLogger(__name__)

TELL_WITHIN_S: Final = 5.0
"""How long a rank whose capture has failed waits until the others leave theirs, in seconds. Ranks that capture the same
graphs are usually not further apart. A rank that takes longer may wait for this one inside of its capture."""

_WHAT: Final = "graph_capture"


def tell_failure(inputs: GraphInputs, health: GroupHealth, error: Exception, timeout_s: float) -> None:
    """Tell the other ranks in their `finish_capture` that this rank's capture has raised `error`.

    *Collective* with `GraphInputs.finish`. *Blocks* up to `TELL_WITHIN_S`, or half the group's deadline if that is
    shorter. If a rank has not come by then, the group is broken: the failure record names this rank and quotes `error`.
    Every exception but that of a signal handler is logged instead of raised, as the caller raises `error`.

    Args:
        inputs: The captured inputs, which are discarded.
        health: The group's shared state.
        error: What the body of the capture has raised.
        timeout_s: The group's deadline in seconds.
    """
    text = f"its graph capture has failed: {type(error).__name__}: {error}"[:MAX_TEXT_CHARS]
    record = FailureRecord(
        "interrupted", (health.rank,), health.rank, _WHAT, detail=f"{health.rank} ({text})"
    )
    within_s = min(TELL_WITHIN_S, timeout_s / 2)
    # Breaking the group also ends the exchange. With a deadline of its own the exchange would publish a record that
    # blames the ranks that it waits for.
    alarm = threading.Timer(within_s, health.fail, (error, _WHAT, record))
    alarm.daemon = True
    alarm.start()
    try:
        _tell(inputs, health, text)
    except Exception as trouble:
        if raised_by_handler(trouble):
            raise
        logger.warning(
            "%s: the other ranks could not be told within %.1f s that %s (%s)",
            *(health.where(_WHAT), within_s, text, trouble),
            extra=health.log_fields(_WHAT),
        )
        if not health.is_broken:
            health.fail(error, _WHAT, record)
    finally:
        alarm.cancel()
        alarm.join()


def _tell(inputs: GraphInputs, health: GroupHealth, text: str) -> None:
    while True:
        try:
            inputs.finish(text)
        except CapabilityError:
            return
        except DisagreementError as error:
            # A rank was in another call inside of its capture, which has raised too, so it may come to the end now.
            logger.info("%s: %s", health.where(_WHAT), error, extra=health.log_fields(_WHAT))
