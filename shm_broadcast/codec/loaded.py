"""Find a class by its name in the modules that are already loaded, without running any code.

The name may come from a peer: nothing is imported, and neither a module's `__getattr__` nor a descriptor runs.
"""

import sys
from types import ModuleType
from typing import Any

__all__ = ["class_dict", "find_class", "find_member", "is_loaded", "own_names"]

_MODULE_DICT: Any = vars(ModuleType)["__dict__"]
_CLASS_DICT: Any = vars(type)["__dict__"]
_QUALNAME: Any = vars(type)["__qualname__"]


def class_dict(cls: type) -> Any:
    """Return the dictionary of a class, past whatever its metaclass does."""
    return _CLASS_DICT.__get__(cls)


def find_member(cls: type, name: str) -> object:
    """Return what a class or its bases have under `name`, without asking a descriptor; None if nothing."""
    return next((class_dict(base)[name] for base in cls.__mro__ if name in class_dict(base)), None)


def own_names(cls: type) -> tuple[object, str]:
    """Return the module and qualified name that a class says it has. Only a module that is a str is a name."""
    return class_dict(cls).get("__module__"), _QUALNAME.__get__(cls)


def is_loaded(module_name: str) -> bool:
    """Return whether this process has imported the module."""
    return issubclass(type(sys.modules.get(module_name)), ModuleType)


def find_class(module_name: str, qualname: str) -> type[Any] | None:
    """Return the class that stands under `qualname` in a loaded module, or None."""
    module = sys.modules.get(module_name)
    if not issubclass(type(module), ModuleType):
        return None
    scope = _MODULE_DICT.__get__(module)
    found: Any = None
    for part in qualname.split("."):
        found = scope.get(part)
        if not issubclass(type(found), type):
            return None
        scope = _CLASS_DICT.__get__(found)
    return found  # type: ignore[no-any-return]
