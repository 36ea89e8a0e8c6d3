"""What the source of the three packages must not contain, as functions from source text to complaints."""

import ast
import functools
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence

__all__ = [
    "cpp_code_lines",
    "cpp_functions",
    "guarding_asserts",
    "imports",
    "nodes",
    "pickling",
    "python_code_lines",
    "python_functions",
    "reads_environment",
    "swallowed_errors",
    "sync_problems",
]

PICKLING_MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "multiprocessing",
}
# It tells the secret that a process shares with its children.
PICKLES_NOTHING = "multiprocessing.process.current_process"
PICKLING_TORCH = (
    "torch.load.",
    "torch.save.",
    "torch.multiprocessing.",
    "torch.package.",
    "torch.serialization.",
)
BROAD = {"Exception", "BaseException"}
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@functools.cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Return every node of a file, parsed once for all rules."""
    return tuple(ast.walk(ast.parse(source)))


# --- Python: names --------------------------------------------------------------------------------------------


def imports(source: str, package: str = "") -> list[tuple[str, bool]]:
    """Return each imported module, dotted, and whether it is imported inside a function.

    `package` is the dotted package of the file, against which relative imports are resolved.
    """
    tree = nodes(source)
    inside = {id(node) for function in tree if _is_function(function) for node in ast.walk(function)}
    found = []
    for node in tree:
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base] if base else parent)
            found += [(f"{base}.{alias.name}", id(node) in inside) for alias in node.names]
    return found


def pickling(source: str) -> list[str]:
    """Return every use of something that pickles."""
    complaints = []
    for line, name in _uses(nodes(source)):
        parts = name.split(".")
        if name == PICKLES_NOTHING:
            continue
        if parts[0] in PICKLING_MODULES or f"{name}.".startswith(PICKLING_TORCH):
            complaints.append(f"line {line}: {name}")
        elif parts[-1].endswith("_pyobj"):
            complaints.append(f"line {line}: {name} pickles")
        elif parts[:2] == ["torch", "distributed"] and "object" in parts[-1]:
            complaints.append(f"line {line}: {name} pickles inside")
    return complaints


def reads_environment(source: str) -> list[str]:
    """Return every use of the process's environment."""
    banned = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"}
    return [
        f"line {line}: {name}"
        for line, name in _uses(nodes(source))
        if ".".join(name.split(".")[:2]) in banned
    ]


def _uses(tree: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield every imported name and every attribute chain, with aliases of imports resolved."""
    aliases: dict[str, str] = {}
    for node in tree:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
                aliases[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in tree:
        if isinstance(node, ast.Attribute):
            chain = _chain(node)
            if chain is not None:
                head, *rest = chain
                yield node.lineno, ".".join([aliases.get(head, head), *rest])
            elif node.attr.endswith("_pyobj"):
                yield node.lineno, f"(...).{node.attr}"
        elif isinstance(node, ast.Call) and _is_import_call(node):
            yield node.lineno, str(node.args[0].value) if isinstance(node.args[0], ast.Constant) else "?"


def _chain(node: ast.AST) -> list[str] | None:
    """Return ["a", "b", "c"] for `a.b.c`; None if the chain does not start with a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else None


def _is_import_call(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in ("import_module", "__import__") and bool(node.args)


# --- Python: statements ---------------------------------------------------------------------------------------


def guarding_asserts(source: str) -> list[str]:
    """Return every `assert` that does more than narrow a type: `isinstance`, `callable`, `is (not) None`."""
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in nodes(source)
        if isinstance(node, ast.Assert) and not _narrows(node.test)
    ]


def _narrows(test: ast.expr) -> bool:
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Name):
        return test.func.id in ("isinstance", "issubclass", "callable")
    if isinstance(test, ast.Compare):
        return all(isinstance(operator, ast.Is | ast.IsNot) for operator in test.ops)
    return isinstance(test, ast.BoolOp) and all(_narrows(value) for value in test.values)


def swallowed_errors(source: str) -> list[str]:
    """Return every place where any error whatever is dropped without a word."""
    complaints = []
    for node in nodes(source):
        if (
            isinstance(node, ast.ExceptHandler)
            and _is_broad(node.type)
            and all(map(_says_nothing, node.body))
        ):
            complaints.append(f"line {node.lineno}: except without a word")
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).split(".")[-1] == "suppress"
            and any(_is_broad(argument) for argument in node.args)
        ):
            complaints.append(f"line {node.lineno}: {ast.unparse(node)}")
    return complaints


def _is_broad(kind: ast.expr | None) -> bool:
    if isinstance(kind, ast.Tuple):
        return any(_is_broad(each) for each in kind.elts)
    return kind is None or ast.unparse(kind).split(".")[-1] in BROAD


def _says_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Pass | ast.Continue | ast.Break):
        return True
    if isinstance(statement, ast.Return):
        return statement.value is None or isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


# --- Python: sizes --------------------------------------------------------------------------------------------


@functools.cache
def python_code_lines(source: str) -> frozenset[int]:
    """Return the numbers of the lines that hold code: not blank, no comment, no docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in nodes(source):
        # A docstring, and the text under an attribute that documents it.
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return frozenset(lines)


def python_functions(source: str) -> list[tuple[str, int]]:
    """Return each function with its number of code lines; a nested function counts for the outer one too."""
    lines = python_code_lines(source)
    return [
        (node.name, len(lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1))))
        for node in nodes(source)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


# --- C++ ------------------------------------------------------------------------------------------------------

CPP_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)
      | R"(?P<mark>[^\s()\\]{0,16})\(.*?\)(?P=mark)"
      | "(?:\\.|[^"\\\n])*"
      | (?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'""",
    re.DOTALL | re.VERBOSE,
)
CONTAINER = re.compile(r"\b(namespace|struct|class|union|enum)\b[^()]*$|\bextern\s*$")
SYNC = re.compile(r"//\s*SYNC (\w+)->(\w+) \((release|acquire|seq_cst)\)")
ORDER = re.compile(
    r"\bmemory_order(?:_|::)(?:acquire|release|acq_rel|seq_cst)\b"
    r"|\b__ATOMIC_(?:ACQUIRE|RELEASE|ACQ_REL|SEQ_CST)\b"
    # The kernels' own: ld_acquire_sys, st_release_sys, fence_acq_rel_sys.
    r"|\b(?:ld_acquire|st_release|fence_acq_rel)_sys\b"
)
SYNC_REACH = 3
"""A comment stands on the line of its operation or at most this many lines above."""


def _plain_cpp(source: str) -> str:
    """Return `source` with comments blanked and strings and characters emptied, line for line."""

    def blank(match: re.Match[str]) -> str:
        lines = "\n" * match[0].count("\n")
        return lines if match["comment"] else '""' + lines

    return CPP_TOKEN.sub(blank, source)


def cpp_code_lines(source: str) -> int:
    """Return the number of lines that are neither blank nor comment only."""
    return sum(1 for line in _plain_cpp(source).splitlines() if line.strip())


def cpp_functions(source: str) -> list[tuple[str, int]]:
    """Return the head of each function, lambda bodies included in theirs, with its number of code lines."""
    text = re.sub(r"^[ \t]*#[^\n]*$", "", _plain_cpp(source), flags=re.MULTILINE)
    found = []
    start, depth_inside, opened = 0, 0, 0
    for position, character in enumerate(text):
        if depth_inside:
            depth_inside += {"{": 1, "}": -1}.get(character, 0)
            if not depth_inside:
                lines = sum(1 for line in text[start : position + 1].splitlines() if line.strip())
                found.append((" ".join(text[start:opened].split()), lines))
                start = position + 1
        elif character == "{":
            head = text[start:position].replace('""', "").strip()
            if not head or CONTAINER.search(head):
                start = position + 1
            else:
                depth_inside, opened = 1, position
        elif character in "};":
            start = position + 1
    return [(head, lines) for head, lines in found if "(" in head]


def sync_problems(sources: dict[str, str]) -> list[str]:
    """Return every memory order without a named edge, every comment of the wrong form, every edge without an end."""
    problems = []
    ends: dict[str, list[str]] = {}
    for name, source in sources.items():
        lines = source.splitlines()
        for number, line in enumerate(lines, 1):
            match = SYNC.search(line)
            if match:
                ends.setdefault(f"{match[1]}->{match[2]}", []).append(match[3])
            elif re.search(r"//.*\bSYNC\b", line):
                problems.append(f"{name}:{number}: not of the form '// SYNC a->b (release)' or '(acquire)'")
            near = "\n".join(lines[max(0, number - 1 - SYNC_REACH) : number])
            if ORDER.search(line.partition("//")[0]) and not SYNC.search(near):
                problems.append(f"{name}:{number}: a memory order without a SYNC comment")
    problems += [
        f"edge {edge} has no {missing} end"
        for edge, kinds in sorted(ends.items())
        for missing in sorted({"release", "acquire"} - set(kinds))
        if "seq_cst" not in kinds
    ]
    # A store and a load of each side, ordered against the other side's: there is no release and no acquire end.
    problems += [f"edge {edge} has one end" for edge, kinds in sorted(ends.items()) if kinds == ["seq_cst"]]
    return problems


def is_standard(module: str) -> bool:
    """Tell whether `module` belongs to Python's standard library."""
    return module.partition(".")[0] in sys.stdlib_module_names
