"""Look in SGLang for what this project needs, and replace SGLang's group, or nothing."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Final

from coordinator.integrations.sglang.group import SglangGroupCoordinator
from coordinator.integrations.surface import gaps, signatures
from shm_broadcast.codec import register_package

__all__ = ["STATE", "install"]

STATE: Final = "sglang.srt.distributed.parallel_state"

# SGLang configures the root logger in each process, so that our lines appear among its own.
logger: logging.Logger = logging.getLogger("sglang.plugins.group_coordinator")

_CLASS: Final = "GroupCoordinator"
# SGLang's custom operations find the group by its name in this registry.
_REGISTER: Final = "_register_group"


def install() -> None:
    """Put `SglangGroupCoordinator` in the place of SGLang's class. Idempotent."""
    state = _state()
    stock: Any = getattr(state, _CLASS, None)
    if stock is SglangGroupCoordinator:
        return
    missing = _missing(state, stock)
    release = _sglang_version()
    if missing:
        logger.warning(
            "group_coordinator: SGLang %s runs with its own groups, because this was looked for and not found: %s",
            release,
            "; ".join(missing),
        )
        return
    register_package("sglang")
    users = _users(stock)
    try:
        for module in users:
            setattr(module, _CLASS, SglangGroupCoordinator)
    except BaseException:
        for module in users:
            setattr(module, _CLASS, stock)
        raise
    logger.info(
        "group_coordinator %s: process %d of SGLang %s uses its groups",
        version("group-coordinator"),
        os.getpid(),
        release,
    )


def _missing(state: ModuleType | None, stock: Any) -> list[str]:
    """Return what SGLang lacks or has beyond our class, in words."""
    if state is None:
        return [f"module {STATE}"]
    if not isinstance(stock, type):
        return [f"class {_CLASS} in {STATE}"]
    missing = gaps(signatures(stock), SglangGroupCoordinator)
    if not callable(getattr(state, _REGISTER, None)):
        missing.append(f"function {_REGISTER} in {STATE}")
    return missing


def _state() -> ModuleType | None:
    try:
        return importlib.import_module(STATE)
    except ImportError as error:
        # SGLang says here which of its dependencies is absent.
        logger.debug("cannot import %s: %s", STATE, error)
        return None


def _users(stock: type) -> list[ModuleType]:
    """Return the modules of SGLang that hold `stock` under its name, which includes the one that defines it."""
    modules = [module for key, module in list(sys.modules.items()) if key.partition(".")[0] == "sglang"]
    # Python writes None there for a module whose import is forbidden.
    return [each for each in modules if isinstance(each, ModuleType) and vars(each).get(_CLASS) is stock]


def _sglang_version() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "of an unknown version"
