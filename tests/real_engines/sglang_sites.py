"""Find SGLang's own uses of its groups, by reading its source: nothing of SGLang is imported.

`scan` returns each call of a method of `GroupCoordinator` on an expression that is a group, each such method that is
passed on as a value, and each call of a function or class of `parallel_state`. It also returns each call that has one
of these names and is neither: `sglang_left_out` says why. SGLang's group itself is left out, since ours takes its
place; so are its tests, its benchmarks and `multimodal_gen`, which has a group class of its own.
"""

import ast
import dataclasses
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

PACKAGE = "sglang.srt.distributed"
STATE = "sglang/srt/distributed/parallel_state.py"
CLASS = "GroupCoordinator"

# A receiver is a group if the last part of its name says so. torch's own functions and the communicators behind a
# group have methods of the same names.
_GROUP_NAME = re.compile(
    r"(^|[._])(\w*_)?(group|tp_group|pp_group|dcp_group|_sum_group|(get_\w+_group))(\(.*\))?$"
)
# The variables of `parallel_state` that hold the groups.
_GROUP_VARIABLE = re.compile(
    r"_(WORLD|TP|PP|DCP|ATTN_TP|ATTN_CP|SHARED_EXPERTS_TP|MOE_DP|MOE_EP|MOE_TP|PDMUX_PREFILL_TP_GROUP)"
)
# Receivers that have the name of a group and are something else.
NOT_GROUPS = ("self.host_pool_group",)


@dataclasses.dataclass(frozen=True)
class Site:
    """One call, or one method that is passed on.

    Attributes:
        path: The file, from the wheel's root.
        line: Its line.
        receiver: The expression before the dot; "" for a function.
        name: The method or the function, as its definition calls it.
        positional: The expressions that are passed by position.
        named: (name, expression) of those that are passed by name.
        is_value: Whether the method is passed on, and called elsewhere.
    """

    path: str
    line: int
    receiver: str
    name: str
    positional: tuple[str, ...]
    named: tuple[tuple[str, str], ...]
    is_value: bool = False

    @property
    def form(self) -> str:
        """Return the call without its values: `all_gather(_, dim=)`."""
        if self.is_value:
            return self.name
        parts = ["_" for _ in self.positional] + [f"{name}=" for name, _ in self.named]
        return f"{self.name}({', '.join(parts)})"


@dataclasses.dataclass(frozen=True)
class Scan:
    """What `scan` found, each by file and line.

    Attributes:
        sites: The uses of groups and of `parallel_state`.
        left_out: Calls that have such a name, on something else.
    """

    sites: list[Site]
    left_out: list[Site]


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


def methods(wheel: Path) -> dict[str, list[str]]:
    """Return the parameters of each method of SGLang's group, those with one underscore too; without `self`."""
    return {
        each.name: [one.arg for one in each.args.args][1:]
        for each in _group_class(parse(wheel / STATE)).body
        if isinstance(each, ast.FunctionDef) and (not each.name.startswith("__") or each.name == "__init__")
    }


def functions(wheel: Path) -> dict[str, list[str]]:
    """Return the parameters of each function and class of `parallel_state`, also by a second name that it has."""
    found: dict[str, list[str]] = {}
    for each in parse(wheel / STATE).body:
        if isinstance(each, ast.FunctionDef):
            found[each.name] = [one.arg for one in each.args.args]
        elif isinstance(each, ast.ClassDef):
            fields = [one for one in each.body if isinstance(one, ast.AnnAssign)]
            found[each.name] = [one.target.id for one in fields if isinstance(one.target, ast.Name)]
        elif isinstance(each, ast.Assign) and isinstance(each.value, ast.Name) and each.value.id in found:
            for target in each.targets:
                assert isinstance(target, ast.Name)
                found[target.id] = found[each.value.id]
    return {**found, CLASS: methods(wheel)["__init__"]}


def scan(wheel: Path) -> Scan:
    """Return every use, and every call that only has the name of one."""
    group, state = set(methods(wheel)) - {"__init__"}, functions(wheel)
    words = re.compile(rf"\b({'|'.join(sorted({*group, *state}))})\b")
    readers = [
        _Reader(wheel, path, group, state)
        for path in sorted((wheel / "sglang" / "srt").rglob("*.py"))
        if words.search(path.read_text())
    ]
    # A function with an underscore belongs to `parallel_state` alone, unless another module imports it.
    imported = {name for each in readers if each.where != STATE for name in each.known.values()}
    sites = [
        site
        for each in readers
        for site in each.sites
        if site.receiver or not site.name.startswith("_") or site.name in imported
    ]
    return Scan(_in_order(sites), _in_order([site for each in readers for site in each.left_out]))


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


class _Reader:
    """Reads one file.

    Attributes:
        where: The file, from the wheel's root.
        known: What each name means that the file has from `parallel_state`.
        sites: The uses in it.
        left_out: The calls that only have the name of one.
    """

    def __init__(self, wheel: Path, path: Path, group: set[str], state: Mapping[str, object]) -> None:
        self.where = str(path.relative_to(wheel))
        self.sites: list[Site] = []
        self.left_out: list[Site] = []
        self._group, self._state = group, state
        tree = parse(path)
        if self.where == STATE:
            tree.body.remove(_group_class(tree))
        self.known = {name: name for name in state} if self.where == STATE else {}
        self._modules: set[str] = set()
        for each in ast.walk(tree):
            self._imports(each)
        called = {id(each.func) for each in ast.walk(tree) if isinstance(each, ast.Call)}
        for each in ast.walk(tree):
            if isinstance(each, ast.Call):
                self._call(each)
            elif isinstance(each, ast.Attribute) and each.attr in group and id(each) not in called:
                self._value(each)

    def _imports(self, node: ast.AST) -> None:
        """Note what the file has from `parallel_state`, or from the package that exports all of it."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in _HOMES:
                    self._modules.add(alias.asname or alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = self._absolute(node)
            for alias in node.names:
                if f"{base}.{alias.name}" in _HOMES:
                    self._modules.add(alias.asname or alias.name)
                elif base in _HOMES and alias.name == "*":
                    self.known |= {name: name for name in self._state}
                elif base in _HOMES and alias.name in self._state:
                    self.known[alias.asname or alias.name] = alias.name

    def _absolute(self, node: ast.ImportFrom) -> str:
        """Return the module that is imported from, as a full name."""
        if not node.level:
            return node.module or ""
        parents = self.where.removesuffix(".py").split("/")[: -node.level]
        return ".".join([*parents, *filter(None, [node.module])])

    def _call(self, call: ast.Call) -> None:
        function = call.func
        if isinstance(function, ast.Attribute):
            receiver, name = ast.unparse(function.value), function.attr
            if name in self._group and self._is_group(receiver):
                self.sites.append(self._site(call, receiver, name))
            elif receiver in self._modules and name in self._state:
                self.sites.append(self._site(call, "", name))
            elif name in self._group or name in self._state:
                self.left_out.append(self._site(call, receiver, name))
        elif isinstance(function, ast.Name) and function.id in self.known:
            self.sites.append(self._site(call, "", self.known[function.id]))
        elif isinstance(function, ast.Name) and function.id in self._state:
            self.left_out.append(self._site(call, "", function.id))

    def _value(self, node: ast.Attribute) -> None:
        """Note a method that is passed on. A property of the same form is read, and `attributes` finds it."""
        receiver = ast.unparse(node.value)
        if self._is_group(receiver) and not node.attr.endswith("_rank"):
            self.sites.append(Site(self.where, node.lineno, receiver, node.attr, (), (), is_value=True))

    def _is_group(self, receiver: str) -> bool:
        if self.where == STATE and _GROUP_VARIABLE.fullmatch(receiver):
            return True
        return _GROUP_NAME.search(receiver) is not None and receiver not in NOT_GROUPS

    def _site(self, call: ast.Call, receiver: str, name: str) -> Site:
        positional = tuple(ast.unparse(each) for each in call.args)
        named = tuple((each.arg or "**", ast.unparse(each.value)) for each in call.keywords)
        return Site(self.where, call.lineno, receiver, name, positional, named)


def _group_class(tree: ast.Module) -> ast.ClassDef:
    (found,) = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == CLASS)
    return found


def _in_order(sites: list[Site]) -> list[Site]:
    return sorted(sites, key=lambda site: (site.path, site.line, site.name))


# The modules that have the functions.
_HOMES = (PACKAGE, f"{PACKAGE}.parallel_state")
