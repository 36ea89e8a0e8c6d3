"""Ray itself, imported when it is needed."""

from __future__ import annotations

from typing import Any

from shm_broadcast.errors import CapabilityError

__all__ = ["import_ray"]


def import_ray() -> Any:
    """Return the module `ray`.

    Raises:
        CapabilityError: It is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise CapabilityError(
            "this needs Ray, which is not installed here: pip install 'group-coordinator[ray]'",
            requirement="the package ray",
        ) from error
    return ray
