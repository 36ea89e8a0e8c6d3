"""Find SGLang's own uses of its groups, by reading its source: nothing of SGLang is imported.

`find` returns each call of a method of `GroupCoordinator` on an expression that is a group, and each call of a getter
of `parallel_state`. SGLang's group itself is left out, since ours takes its place; so are its tests, its benchmarks
and `multimodal_gen`, which has a group class of its own.
"""

import ast
import dataclasses
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

STATE = "sglang/srt/distributed/parallel_state.py"
CLASS = "GroupCoordinator"

# A receiver is a group if the last part of its name says so. torch's own functions and the communicators behind a
# group have methods of the same names.
_GROUP_NAME = re.compile(
    r"(^|[._])(\w*_)?(group|tp_group|pp_group|dcp_group|_sum_group|(get_\w+_group))(\(.*\))?$"
)


@dataclasses.dataclass(frozen=True)
class Site:
    """One call.

    Attributes:
        path: The file, from the wheel's root.
        line: Its line.
        receiver: The expression before the dot; "" for a function.
        name: The method or the function.
        positional: The expressions that are passed by position.
        named: (name, expression) of those that are passed by name.
        discards: Whether the call is a statement, which does not use the result.
    """

    path: str
    line: int
    receiver: str
    name: str
    positional: tuple[str, ...]
    named: tuple[tuple[str, str], ...]
    discards: bool

    @property
    def form(self) -> str:
        """Return the call without its values: `all_gather(_, dim=)`."""
        parts = ["_" for _ in self.positional] + [f"{name}=" for name, _ in self.named]
        return f"{self.name}({', '.join(parts)})"


def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file; doubtful escapes in its strings are its own affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        return ast.parse(path.read_text())


def version_of(wheel: Path) -> str:
    """Return the version in the metadata beside the package."""
    (metadata,) = wheel.glob("sglang-*.dist-info/METADATA")
    found = re.search(r"^Version: (.+)$", metadata.read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def methods(wheel: Path) -> set[str]:
    """Return the names of the methods of SGLang's group, those with one underscore too."""
    return {
        each.name
        for each in _group_class(parse(wheel / STATE)).body
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("__")
    }


def getters(wheel: Path) -> set[str]:
    """Return the names of the functions of `parallel_state` that ask for a group, its size or this rank."""
    tree = parse(wheel / STATE)
    defined = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
    aliases = {
        target.id
        for each in tree.body
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Name) and each.value.id in defined
        for target in each.targets
        if isinstance(target, ast.Name)
    }
    pattern = re.compile(r"get_(\w*_)?(group|world_size|rank|world_rank|group_no_assert)$")
    return {name for name in defined | aliases if pattern.fullmatch(name)}


def find(wheel: Path) -> list[Site]:
    """Return every use, by file and line."""
    group, functions = methods(wheel), getters(wheel)
    sites: list[Site] = []
    for path in sorted((wheel / "sglang" / "srt").rglob("*.py")):
        tree = parse(path)
        where = str(path.relative_to(wheel))
        if where == STATE:
            tree.body.remove(_group_class(tree))
        known = _imported(tree) if where != STATE else functions
        discarded = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
        for call in _calls(tree):
            site = _site(where, call, id(call) in discarded)
            is_method = site.receiver and site.name in group and _is_group(site)
            is_getter = not site.receiver and site.name in functions & known
            if is_method or is_getter:
                sites.append(site)
    return sorted(sites, key=lambda site: (site.path, site.line, site.name))


def attributes(wheel: Path) -> set[str]:
    """Return the public names that SGLang reads of the groups of its runtime context: `get_parallel().tp_group.…`."""
    pattern = re.compile(r"^(get_parallel\(\)|parallel)\.(\w+_)?group$")
    return {
        each.attr
        for path in sorted((wheel / "sglang" / "srt").rglob("*.py"))
        for each in ast.walk(parse(path))
        if isinstance(each, ast.Attribute)
        and not each.attr.startswith("_")
        and isinstance(each.value, ast.Attribute)
        and pattern.match(ast.unparse(each.value))
    }


def _imported(tree: ast.Module) -> set[str]:
    """Return the names that a module imports from `parallel_state`, or from the package that exports them."""
    return {
        alias.asname or alias.name
        for each in ast.walk(tree)
        if isinstance(each, ast.ImportFrom) and (each.module or "").removeprefix("sglang.srt.") in EXPORTERS
        for alias in each.names
    }


def _group_class(tree: ast.Module) -> ast.ClassDef:
    (found,) = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == CLASS)
    return found


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (each for each in ast.walk(tree) if isinstance(each, ast.Call))


def _site(path: str, call: ast.Call, discards: bool) -> Site:
    function = call.func
    receiver = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
    name = (
        function.attr
        if isinstance(function, ast.Attribute)
        else function.id
        if isinstance(function, ast.Name)
        else ""
    )
    return Site(
        path,
        call.lineno,
        receiver,
        name,
        tuple(ast.unparse(each) for each in call.args),
        tuple((each.arg or "**", ast.unparse(each.value)) for each in call.keywords),
        discards,
    )


def _is_group(site: Site) -> bool:
    return _GROUP_NAME.search(site.receiver) is not None and site.receiver not in NOT_GROUPS


# Modules that have the getters, as they are imported.
EXPORTERS: Sequence[str] = ("distributed.parallel_state", "distributed", "parallel_state")
# Receivers that have the name of a group and are something else.
NOT_GROUPS: Sequence[str] = ("self.host_pool_group",)
