"""A forked child's copies of torch's objects must never be finalised.

Gloo's destructor joins threads that a fork does not copy, so it would hang, and a FileStore's destructor
would count the child as a rank that has finished and remove the file under the others. So in a child
every such object gets one reference that is never given back; the process's end frees the memory.
"""

from __future__ import annotations

import ctypes
import os

import torch.distributed as dist

_protected: dict[int, object] = {}


def protect(obj: object) -> None:
    """Keep a forked child from finalising `obj`, until `release`."""
    _protected[id(obj)] = obj


def release(obj: object) -> None:
    """Give `obj` back to the garbage collector."""
    _protected.pop(id(obj), None)


def _immortalise() -> None:
    held = list(_protected.values())
    if dist.is_available() and dist.is_initialized():
        # Also a world that the user initialised: without groups of ours its child would hang just the same.
        held.append(dist.group.WORLD)
    for obj in held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(obj))


os.register_at_fork(after_in_child=_immortalise)
