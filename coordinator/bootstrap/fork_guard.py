"""Keep a forked child from finalising its copies of torch's objects.

Gloo's destructor joins threads that a fork does not copy, so it would hang. A FileStore's destructor would count the
child as a rank that has finished, and remove the file while the others use it. A child therefore takes one extra
reference to each such object and never drops it; the memory is freed when the process ends.
"""

from __future__ import annotations

import ctypes
import os

import torch.distributed as dist

_protected: dict[int, object] = {}


def protect(obj: object) -> None:
    """Keep forked children from finalising `obj`, until `release`."""
    _protected[id(obj)] = obj


def release(obj: object) -> None:
    """End the protection of `obj`."""
    _protected.pop(id(obj), None)


def _immortalise() -> None:
    held = list(_protected.values())
    if dist.is_available() and dist.is_initialized():
        # This includes a world that the user initialised: its destructor would hang in a child, too.
        held.append(dist.group.WORLD)
    for obj in held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(obj))


os.register_at_fork(after_in_child=_immortalise)
