"""The public API as text: names and signatures of the modules that users import.

`make api` (`python -m tests.api_snapshot`) writes them to tests/unit/public_api.txt; a test compares that file.
"""

import enum
import functools
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

SNAPSHOT = Path(__file__).parent / "unit" / "public_api.txt"

MODULES = (
    "coordinator",
    "coordinator.diagnosis.metrics",
    "coordinator.elastic",
    "coordinator.errors",
    "coordinator.functional",
    "coordinator.integrations.ray",
    "coordinator.layout",
    "coordinator.meeting",
    "coordinator.parallel_state",
    "coordinator.settings",
    "coordinator.testing",
    "coordinator.torch_backend",
    "device_comm.base",
    "device_comm.registry",
    "shm_broadcast.codec",
    "shm_broadcast.endpoint",
    "shm_broadcast.handle",
    "shm_broadcast.queue",
    "shm_broadcast.settings",
)
"""The modules that the documentation names.

The members of a class are listed in the module that defines the class, otherwise in the first one that exports it.
"""


def public_api() -> str:
    """Return the whole snapshot as text."""
    spelled: set[type] = set()
    parts = []
    for name in MODULES:
        module = importlib.import_module(name)
        lines = [line for each in public_names(module) for line in _entry(module, each, spelled)]
        parts.append("\n".join([f"# {name}", *lines]) + "\n")
    return "\n".join(parts)


def public_names(module: ModuleType) -> list[str]:
    """Return the names that a module offers: its `__all__`, otherwise what it defines itself."""
    declared: list[str] | None = getattr(module, "__all__", None)
    if declared is not None:
        return sorted(declared)
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    )


def _entry(module: ModuleType, name: str, spelled: set[type]) -> Iterator[str]:
    value = getattr(module, name)
    if inspect.isclass(value):
        if value in spelled:
            yield f"class {name}  (above)"
            return
        # Leave out the bases of our own that users do not import: they are an implementation detail.
        named = [
            base
            for base in value.__bases__
            if base is not object and (base in offered() or not is_ours(base))
        ]
        bases = ", ".join(base.__name__ for base in named)
        yield f"class {name}({bases})" if bases else f"class {name}"
        yield from (f"    {line}" for line in _members(value, spelled))
        spelled.add(value)
    elif inspect.isroutine(value):
        yield f"def {name}{_signature(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def _members(kind: type, spelled: set[type]) -> Iterator[str]:
    if issubclass(kind, enum.Enum):
        yield from (f"{each.name} = {each.value!r}" for each in kind)
        return
    constructor = vars(kind).get("__init__") or (hasattr(kind, "__struct_fields__") and kind)
    if constructor and not getattr(kind, "_is_protocol", False):
        yield f"__init__{_signature(constructor)}"
    above = {owner for base in kind.__mro__[1:] if base in spelled for owner in base.__mro__}
    for name in sorted(dir(kind)):
        # Include members that come from our bases outside of the snapshot: users call them on this class.
        owner = next(base for base in kind.__mro__ if name in vars(base))
        if name.startswith("_") or owner.__module__.partition(".")[0] not in OURS or owner in above:
            continue
        found = inspect.getattr_static(kind, name)
        if isinstance(found, property):
            yield f"{name}: property{_result(found.fget)}"
        elif isinstance(found, classmethod | staticmethod):
            yield f"{type(found).__name__} {name}{_signature(found.__func__)}"
        elif inspect.isfunction(found):
            yield f"{name}{_signature(found)}"


OURS = ("coordinator", "device_comm", "shm_broadcast")


def is_ours(kind: type) -> bool:
    """Return whether one of the packages defines `kind`."""
    return kind.__module__.partition(".")[0] in OURS


@functools.cache
def offered() -> frozenset[type]:
    """Return the classes that users import."""
    modules = [importlib.import_module(name) for name in MODULES]
    found = (getattr(module, name) for module in modules for name in public_names(module))
    return frozenset(each for each in found if inspect.isclass(each))


def _signature(function: Any) -> str:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return "(...)"
    parameters = [
        each.replace(annotation=_bare(each.annotation), default=_steady(each.default))
        for each in signature.parameters.values()
    ]
    bare = signature.replace(parameters=parameters, return_annotation=_bare(signature.return_annotation))
    # Python 3.13 leaves the module out.
    return str(bare).replace("typing.Annotated", "Annotated")


def _result(getter: Any) -> str:
    annotation = inspect.signature(getter).return_annotation
    return (
        "" if annotation is inspect.Signature.empty else f" -> {inspect.formatannotation(_bare(annotation))}"
    )


class _Text:
    """Text that `repr` shows without quotes."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _bare(annotation: Any) -> Any:
    return _Text(annotation) if isinstance(annotation, str) else annotation


def _steady(default: Any) -> Any:
    """Return `default`, or the name of its type if its repr contains an address."""
    return _Text(type(default).__name__) if " at 0x" in repr(default) else default


if __name__ == "__main__":
    SNAPSHOT.write_text(public_api())
    sys.stdout.write(f"wrote {SNAPSHOT}\n")
