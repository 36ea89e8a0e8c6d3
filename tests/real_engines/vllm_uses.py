"""Find in vLLM's source what its classes set, what its other modules read of them, and what the plugin uses.

Nothing of vLLM is imported. Its own groups and queues are left out as readers, since ours take their place, and so is
elastic expert parallelism, which the plugin refuses.
"""

import ast
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from coordinator.integrations.vllm.plugin import HANDLE, NEEDS, PLACES

CLASSES = {place.name: place.module.replace(".", "/") + ".py" for place in (*PLACES, HANDLE)}
LEFT_OUT = (
    "vllm/distributed/stateless_coordinator.py",
    "vllm/distributed/elastic_ep/",
    CLASSES["MessageQueue"],
)
# What only groups of an elastic engine have, which are of a class of vLLM's own.
ELASTIC = {"tcp_store_group"}
QUEUE_NAME = re.compile(r"(^|[._])mq$|_mq$|^mq_broadcaster$")
HANDLE_NAME = re.compile(r"handle$")


def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file; doubtful escapes in its strings are its own affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        return ast.parse(path.read_text())


def class_of(tree: ast.Module, name: str) -> ast.ClassDef | None:
    """Return a class that a module defines, or None."""
    for each in tree.body:
        if isinstance(each, ast.ClassDef) and each.name == name:
            return each
    return None


def parameters_of(function: ast.FunctionDef, *, is_method: bool = True) -> list[str] | None:
    """Return the parameters of a function without `self`, as `coordinator.integrations.surface` writes them.

    None stands for a property.
    """
    kinds = {each.id for each in function.decorator_list if isinstance(each, ast.Name)}
    if kinds & {"property", "cached_property"}:
        return None
    found = function.args
    places = [each.arg for each in (*found.posonlyargs, *found.args)]
    first = len(places) - len(found.defaults)
    written = [f"{name}=" if place >= first else name for place, name in enumerate(places)]
    named = zip(found.kwonlyargs, found.kw_defaults, strict=True)
    written += [f"*{each.arg}" + ("" if default is None else "=") for each, default in named]
    return written[1:] if is_method and "staticmethod" not in kinds else written


# --- what the classes set -------------------------------------------------------------------------------------


def sets(wheel: Path) -> dict[str, list[str]]:
    """Return for each class the public names that it declares for its objects, or assigns to `self`."""
    found = {}
    for name, path in CLASSES.items():
        cls = class_of(parse(wheel / path), name)
        assert cls is not None, f"{name} in {path}"
        declared = {
            each.target.id
            for each in cls.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }
        assigned = {
            each.attr
            for method in cls.body
            if isinstance(method, ast.FunctionDef)
            for each in ast.walk(method)
            if isinstance(each, ast.Attribute)
            and isinstance(each.ctx, ast.Store)
            and ast.unparse(each.value) == "self"
        }
        found[name] = sorted(each for each in declared | assigned if not each.startswith("_"))
    return found


# --- what other modules read ----------------------------------------------------------------------------------


def reads(wheel: Path) -> dict[str, list[str]]:
    """Return for each class the public names that other modules of vLLM read of its objects."""
    getters = _getters(wheel)
    fields = set(sets(wheel)[HANDLE.name])
    found: dict[str, set[str]] = {name: set() for name in CLASSES}
    for path in sorted((wheel / "vllm").rglob("*.py")):
        where, text = str(path.relative_to(wheel)), path.read_text()
        if where.startswith(LEFT_OUT):
            continue
        if "GroupCoordinator" in text or any(f"{getter}(" in text for getter in getters):
            found["GroupCoordinator"] |= set(_read_of_groups(_without_group_class(where, path), getters))
        if "shm_broadcast" in text:
            for each in _reads(_without_group_class(where, path)):
                receiver = ast.unparse(each.value)
                if QUEUE_NAME.search(receiver):
                    found["MessageQueue"].add(each.attr)
                if HANDLE_NAME.search(receiver) and each.attr in fields:
                    found[HANDLE.name].add(each.attr)
    return {
        name: sorted(each for each in names - ELASTIC if not each.startswith("_"))
        for name, names in found.items()
    }


def _getters(wheel: Path) -> set[str]:
    """Return the functions of `parallel_state` that return a group."""
    return {
        each.name
        for each in parse(wheel / CLASSES["GroupCoordinator"]).body
        if isinstance(each, ast.FunctionDef)
        and each.name.startswith("get_")
        and each.returns is not None
        and "GroupCoordinator" in ast.unparse(each.returns)
    }


def _without_group_class(where: str, path: Path) -> ast.Module:
    tree = parse(path)
    if where == CLASSES["GroupCoordinator"]:
        cls = class_of(tree, "GroupCoordinator")
        assert cls is not None
        tree.body.remove(cls)
    return tree


def _reads(tree: ast.AST) -> Iterator[ast.Attribute]:
    return (
        each for each in ast.walk(tree) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Load)
    )


def _read_of_groups(tree: ast.Module, getters: set[str]) -> Iterator[str]:
    """Yield what is read of a group: of a getter's result, and of a name or an attribute that holds one."""
    everywhere = {each for each in _holders(tree, getters) if "." in each}
    scopes = [each for each in ast.walk(tree) if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for scope in (tree, *scopes):
        # A name holds a group within its function; what an object holds, all methods of the module read.
        held = everywhere | (set(_holders(scope, getters)) if scope is not tree else set())
        for each in _reads(scope):
            if _is_getter(each.value, getters) or ast.unparse(each.value) in held:
                yield each.attr


def _holders(scope: ast.AST, getters: set[str]) -> Iterator[str]:
    """Yield the names and attributes to which a group is assigned, and the parameters that are annotated as groups."""
    for each in ast.walk(scope):
        if isinstance(each, ast.arg) and each.annotation is not None:
            if re.search(r"\bGroupCoordinator\b", ast.unparse(each.annotation)):
                yield each.arg
        elif isinstance(each, ast.Assign) and _is_getter(each.value, getters):
            yield from (ast.unparse(target) for target in each.targets)
        elif isinstance(each, (ast.AnnAssign, ast.NamedExpr)) and _is_getter(each.value, getters):
            yield ast.unparse(each.target)


def _is_getter(value: ast.expr | None, getters: set[str]) -> bool:
    """Return whether an expression is a call of a getter, or one of its alternatives is."""
    if isinstance(value, ast.IfExp):
        return _is_getter(value.body, getters) or _is_getter(value.orelse, getters)
    if not isinstance(value, ast.Call):
        return False
    function = value.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in getters


# --- what the plugin uses -------------------------------------------------------------------------------------


def needs(wheel: Path) -> dict[str, list[str] | None]:
    """Return the parameters of each thing that the plugin calls, and None for what it reads."""
    return {need.name: _definition(wheel, need.module, need.name) for need in NEEDS}


def _definition(wheel: Path, module: str, name: str) -> list[str] | None:
    """Return the parameters of what a module or one of a package's modules defines; None for what is no function."""
    place = wheel / module.replace(".", "/")
    outer, _, member = name.partition(".")
    for path in sorted(place.glob("*.py")) if place.is_dir() else [place.with_suffix(".py")]:
        tree = parse(path)
        scope: ast.ClassDef | ast.Module | None = class_of(tree, outer) if member else tree
        for each in [] if scope is None else scope.body:
            if isinstance(each, ast.FunctionDef) and each.name == (member or outer):
                return parameters_of(each, is_method=bool(member))
            if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == member:
                return None
    raise LookupError(f"{name} in {module}")
