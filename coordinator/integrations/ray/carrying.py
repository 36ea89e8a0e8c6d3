"""Let Ray carry handles of queues: its workers are no family of processes in the sense of `sealing`."""

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["carry_in_clear"]


def carry_in_clear(cls: type, take: Callable[[Any], object], build: Callable[[Any], object]) -> None:
    """If this process is part of a Ray cluster, let Ray send objects of `cls` as `take` returns them.

    Whoever can change what Ray's channels carry rules every process of the cluster already, because it is pickled code.
    Whoever can only read them learns the key: they must be private, or use Ray's TLS. Other serialisers still use
    `cls.__reduce__`.

    Args:
        cls: A class whose objects hold a key.
        take: Returns what is sent for an object.
        build: Returns the object again; it must be a function of a module, because Ray sends its name.
    """
    ray: Any = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.util.register_serializer(cls, serializer=take, deserializer=build)
