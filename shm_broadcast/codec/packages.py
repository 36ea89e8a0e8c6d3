"""Keep which packages are allowed as a whole, and find their classes by name.

A permission, not a table of classes: a class is looked at when it is first met. Its name comes from a peer, so it is
resolved only in modules that are already imported, and only to the class that has exactly this module and name.
"""

import sys
from typing import Final

from shm_broadcast.codec.loaded import find_class, is_loaded, own_names
from shm_broadcast.codec.wire_format import Refusal
from shm_broadcast.errors import DecodeError, UsageError

__all__ = ["allow", "class_named", "disallow", "name_in_package", "package_of"]

_OURS: Final = ("coordinator", "device_comm", "shm_broadcast")
_NEVER: Final = frozenset(
    (*sys.stdlib_module_names, *sys.builtin_module_names, *_OURS, "msgspec", "numpy", "torch", "zmq")
)
"""Top-level packages that cannot be registered: what they hold that is data is carried anyway."""

_LONGEST_NAME: Final = 1000

_allowed: Final[set[str]] = set()


def allow(name: str) -> None:
    """Allow a package.

    Raises:
        UsageError: `name` is no name of a package, or a package that is never allowed.
    """
    if type(name) is not str or len(name) > _LONGEST_NAME or not all(map(str.isidentifier, name.split("."))):
        raise UsageError(f"register_package needs the name of a package, such as 'vllm', got {name!r:.200}")
    root = name.partition(".")[0]
    if root in ("__main__", "__mp_main__"):
        raise UsageError(
            f"register_package: {root!r} is another program in each process; use register_type()"
        )
    if root in _NEVER:
        raise UsageError(
            f"register_package: {root!r} cannot be allowed as a whole; what it has for data needs no registration"
        )
    _allowed.add(name)


def disallow(name: str) -> None:
    """Take the permission back.

    Raises:
        UsageError: The package is not allowed.
    """
    if type(name) is not str or name not in _allowed:
        raise UsageError(f"unregister_package: {name!r:.200} is not registered")
    _allowed.remove(name)


def package_of(module_name: object) -> str | None:
    """Return the allowed package that a module is or is in, or None."""
    if type(module_name) is not str:
        return None
    dotted = f"{module_name}."
    # A copy, made in one step, because another thread may register a package meanwhile.
    return next((name for name in tuple(_allowed) if dotted.startswith(f"{name}.")), None)


def name_in_package(cls: type) -> str | None:
    """Return the name in messages of a class of an allowed package, or None for any other class.

    Raises:
        Refusal: A receiver cannot find the class by this name.
    """
    module_name, qualname = own_names(cls)
    if package_of(module_name) is None:
        return None
    name = f"{module_name}:{qualname}"
    if len(name) > _LONGEST_NAME or _find(name) is not cls:
        raise Refusal(
            f"a receiver cannot find this class as {qualname:.200} in {module_name:.200}; define it at the top of its "
            f"module or inside of a class there, or call register_type() for it with a name"
        )
    return name


def class_named(name: str) -> type:
    """Return the class of an allowed package that a name in a message means.

    Raises:
        DecodeError: The package is not allowed, the module is not imported, or it has no such class of its own.
    """
    module_name, colon, qualname = name.partition(":")
    if not colon or len(name) > _LONGEST_NAME or package_of(module_name) is None:
        also = f" or register_package({module_name.partition('.')[0]!r:.100})" if colon else ""
        raise DecodeError(
            f"the message holds a {name:.200}, which is not registered here; if it belongs to your application, "
            f"call register_type(){also} for it in this process too"
        )
    if not is_loaded(module_name):
        raise DecodeError(
            f"the message holds a {name:.200}, but this process has not imported {module_name:.200}; import it before "
            f"the first message, because nothing is imported for a message"
        )
    found = _find(name)
    if found is None or own_names(found) != (module_name, qualname):
        raise DecodeError(
            f"the message holds a {name:.200}, but {module_name:.200} defines no such class here"
        )
    return found


def _find(name: str) -> type | None:
    module_name, _, qualname = name.partition(":")
    return find_class(module_name, qualname)
