"""The rules of the house, checked over the source tree."""

import ast
import re
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import grimp
import pytest

from device_comm.base import DeviceCommunicator
from tests.architecture import rules
from tests.architecture.count_lines import count, crowded_folders
from tests.strict import STRICT

ROOT = Path(__file__).parents[2]
LAYERS = ["shm_broadcast", "device_comm", "coordinator"]
PYTHON = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
CPP = sorted(
    path
    for layer in LAYERS
    for path in (ROOT / layer).rglob("*")
    if path.suffix in {".c", ".cc", ".cpp", ".h", ".hpp", ".cu", ".cuh"}
)
TESTS_AND_HELPERS = sorted((ROOT / "tests").rglob("*.py"))
TESTS = [path for path in TESTS_AND_HELPERS if path.name.startswith("test_")]

MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 60
ENVIRONMENT_READER = ROOT / "coordinator" / "settings.py"
RUNTIME = {"torch", "zmq", "msgspec"}
EXTRAS = {"cuda", "nccl", "numpy", "opentelemetry", "prometheus_client", "ray", "rich"}
LAZY_ADAPTERS = ("shm_broadcast.codec.torch_adapter", "shm_broadcast.codec.numpy_adapter")
BELOW_DEVICE_COMM = {
    *(
        "errors",
        "interruption",
        "liveness",
        "reports",
        "segment",
        "stacks",
        "status",
        "threads",
        "timeouts",
        "wait",
    ),
}
# Point to point goes through rings of the queue's protocol; results of collectives take memory from its pool.
RING_USERS = {
    "channels.py": {"_core", "codec", "layout"},
    "channel_ends.py": {"_core", "codec"},
    "channel_receiver.py": {"_core", "codec"},
    "channel_sender.py": {"_core", "codec"},
    "receiving_any.py": {"_core"},
    "communicator.py": {"_core"},
}
# What the contract of a communicator may be built on.
CONTRACT = {
    f"device_comm/{name}.py"
    for name in (
        *(
            "async_calls",
            "base",
            "checks",
            "handles",
            "health",
            "movable",
            "outputs",
            "reduction",
            "stages",
        ),
        *("fused/finalize", "fused/forms", "fused/fp4", "fused/fp8", "fused/rms_norm"),
        "experts/exchange",
    )
}
WORDS = {4: "Four", 5: "Five", 6: "Six"}
GUARANTEE = re.compile(r"^\s*(?:[-*]\s+|\|\s*)\*\*([A-Z]\d+)\*\*", re.MULTILINE)


def name_of(path: Path) -> str:
    """Return the path as people write it."""
    return str(path.relative_to(ROOT))


def of_every(paths: Sequence[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Turn a check of one file into one test of all `paths`, whose failure names each wrong file and says why.

    A test for each file took 24 ms of overhead, 45 s in all.
    """

    def make(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            wrong = {}
            for path in paths:
                try:
                    check(path)
                except AssertionError as error:
                    wrong[name_of(path)] = str(error)
            assert wrong == {}

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return make


# --- the three packages ---------------------------------------------------------------------------------------


def test_there_is_something_to_check() -> None:
    """The lists of files are not empty."""
    assert len(PYTHON) > 10
    assert CPP
    assert len(TESTS) > 3


@of_every(PYTHON)
def test_nothing_pickles(path: Path) -> None:
    """No module imports or calls what pickles, torch's object collectives and multiprocessing included."""
    assert rules.pickling(path.read_text()) == []


@of_every(PYTHON)
def test_one_module_reads_the_environment(path: Path) -> None:
    """Only coordinator/settings.py touches the process's environment."""
    found = rules.reads_environment(path.read_text())
    assert bool(found) == (path == ENVIRONMENT_READER), found


@of_every(PYTHON)
def test_no_assert_guards_input(path: Path) -> None:
    """An `assert` only narrows a type: with -O it vanishes."""
    assert rules.guarding_asserts(path.read_text()) == []


@of_every(PYTHON)
def test_no_error_is_swallowed(path: Path) -> None:
    """No handler drops every error without a word."""
    assert rules.swallowed_errors(path.read_text()) == []


@of_every(PYTHON)
def test_python_files_and_functions_are_small(path: Path) -> None:
    """A file has at most 400 lines of code, a function at most 60; docstrings, comments and blanks do not count."""
    source = path.read_text()
    if source.count("\n") <= MOST_FUNCTION_LINES:
        return
    assert len(rules.python_code_lines(source)) <= MOST_FILE_LINES
    assert [each for each in rules.python_functions(source) if each[1] > MOST_FUNCTION_LINES] == []


@of_every(TESTS_AND_HELPERS)
def test_files_of_tests_are_small(path: Path) -> None:
    """A file of tests, or a helper of tests, has at most 400 lines of code; its functions have no limit."""
    source = path.read_text()
    # Most files have fewer lines of any kind: to tell which are code would take seven seconds.
    assert source.count("\n") <= MOST_FILE_LINES or len(rules.python_code_lines(source)) <= MOST_FILE_LINES


@of_every(CPP)
def test_native_files_and_functions_are_small(path: Path) -> None:
    """The same limits hold for C++ and CUDA."""
    source = path.read_text()
    assert rules.cpp_code_lines(source) <= MOST_FILE_LINES
    assert [each for each in rules.cpp_functions(source) if each[1] > MOST_FUNCTION_LINES] == []


@of_every(PYTHON + CPP)
def test_names_say_something(path: Path) -> None:
    """No module is called utils, common, helpers or misc."""
    assert not re.search(r"(^|_)(utils?|commons?|helpers?|misc)(_|$)", path.stem)


@of_every(PYTHON)
def test_imports_point_downwards(path: Path) -> None:
    """A package imports itself, lower ones, the standard library and the declared dependencies, nothing else."""
    package = path.relative_to(ROOT).parts[0]
    ours = set(LAYERS[: LAYERS.index(package) + 1])
    for module, is_lazy in imported_by(path):
        top = module.partition(".")[0]
        if top in EXTRAS:
            assert is_lazy or path.stem == f"{top}_adapter", (
                f"{module} is optional: import it where it is needed"
            )
            continue
        assert rules.is_standard(top) or top in ours | RUNTIME, module


def test_the_contract_of_a_communicator_knows_no_implementation() -> None:
    """`base.py` imports neither shared memory nor CUDA nor Gloo, and nothing that it imports does."""
    seen, open_ = set(), ["device_comm/base.py"]
    while open_:
        name = open_.pop()
        seen.add(name)
        for module, _ in imported_by(ROOT / name):
            parts = module.split(".")
            # Of a name in a module, or of a module, the file that is loaded.
            found = ("/".join(parts[:end]) + ".py" for end in (len(parts), len(parts) - 1))
            open_ += [
                each
                for each in found
                if parts[0] == "device_comm" and each not in seen and (ROOT / each).exists()
            ]
    assert seen <= CONTRACT, sorted(seen - CONTRACT)


def test_the_page_names_the_methods_that_a_communicator_needs() -> None:
    """As many as are abstract, in words and by name."""
    page = (ROOT / "docs" / "howto" / "add-a-communicator.md").read_text()
    needed = DeviceCommunicator.__abstractmethods__
    assert f"{WORDS[len(needed)]} methods are enough" in page
    sentence = page.partition("methods are enough:")[2].partition(". ")[0]
    assert set(re.findall(r"`(\w+)`", sentence)) == needed


@of_every(PYTHON)
def test_nothing_is_left_to_a_sibling(path: Path) -> None:
    """No method waits for another base class to define it: `NotImplementedError` is raised nowhere."""
    assert "NotImplementedError" not in path.read_text()


@of_every(PYTHON)
def test_the_bottom_layer_needs_no_torch(path: Path) -> None:
    """In shm_broadcast only torch_adapter.py imports torch, only numpy_adapter.py numpy; no module imports those."""
    if path.relative_to(ROOT).parts[0] != "shm_broadcast":
        return
    for module, is_lazy in imported_by(path):
        top = module.partition(".")[0]
        assert top not in ("torch", "numpy") or path.stem == f"{top}_adapter", module
        assert is_lazy or not module.startswith(LAZY_ADAPTERS), module


@of_every(PYTHON)
def test_the_middle_layer_leaves_the_queue_alone(path: Path) -> None:
    """Of shm_broadcast, device_comm uses what is listed only; channels use its ring and codec too."""
    if path.relative_to(ROOT).parts[0] != "device_comm":
        return
    used = {module.split(".")[1] for module, _ in imported_by(path) if module.startswith("shm_broadcast.")}
    assert used <= BELOW_DEVICE_COMM | RING_USERS.get(path.name, set())


def test_the_layout_is_pure() -> None:
    """coordinator/layout.py imports the standard library and our errors, nothing else."""
    found = {module for module, _ in imported_by(ROOT / "coordinator" / "layout.py")}
    assert {module for module in found if not rules.is_standard(module)} == {
        "shm_broadcast.errors.UsageError"
    }


def test_the_errors_import_nothing_of_ours() -> None:
    """shm_broadcast/errors.py imports the standard library only."""
    assert all(rules.is_standard(module) for module, _ in imported_by(ROOT / "shm_broadcast" / "errors.py"))


def test_synchronisation_edges_have_two_ends() -> None:
    """Each acquire and each release names its edge, and each edge has both."""
    assert rules.sync_problems({name_of(path): path.read_text() for path in CPP}) == []


def test_three_runtime_dependencies() -> None:
    """Installing the product pulls torch, pyzmq and msgspec, nothing else."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[\s<>=!~;\[]", each, maxsplit=1)[0] for each in project["dependencies"]}
    assert names == {"torch", "pyzmq", "msgspec"}


def imported_by(path: Path) -> list[tuple[str, bool]]:
    """Return what a file of ours imports, relative imports resolved."""
    return rules.imports(path.read_text(), ".".join(path.relative_to(ROOT).parent.parts))


# --- promises and tests ---------------------------------------------------------------------------------------


def promised() -> list[str]:
    """Return the number of every guarantee in every DESIGN.md."""
    return [
        number for path in sorted(ROOT.glob("*/DESIGN.md")) for number in GUARANTEE.findall(path.read_text())
    ]


def shown() -> set[str]:
    """Return every number that a test is marked with."""
    numbers = set()
    for path in TESTS:
        source = path.read_text()
        for node in rules.nodes(source) if "mark.guarantee" in source else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.guarantee":
                numbers |= {
                    str(argument.value) for argument in node.args if isinstance(argument, ast.Constant)
                }
    return numbers


def test_every_guarantee_has_a_test() -> None:
    """Each number in a DESIGN.md is the mark of at least one test."""
    assert sorted(set(promised()) - shown()) == []


def test_every_mark_names_a_guarantee() -> None:
    """Each number that a test is marked with stands in a DESIGN.md."""
    assert sorted(shown() - set(promised())) == []


def test_guarantees_are_numbered_once() -> None:
    """No number stands for two guarantees."""
    found = promised()
    assert sorted({number for number in found if found.count(number) > 1}) == []


@of_every(TESTS)
def test_every_test_says_what_it_shows(path: Path) -> None:
    """Each test has a docstring."""
    silent = [
        node.name
        for node in rules.nodes(path.read_text())
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert silent == []


# --- importing ------------------------------------------------------------------------------------------------

IMPORT_QUIETLY = """
import os, sys, threading
import torch, torch.distributed

class Recorder(type(os.environ)):
    seen = []
    def __getitem__(self, key):
        Recorder.seen.append(key)
        return super().__getitem__(key)
    def __iter__(self):
        Recorder.seen.append("all of it")
        return super().__iter__()

def held():
    return os.listdir("/proc/self/task"), sorted(os.listdir("/proc/self/fd")), threading.enumerate()

modules, before = set(sys.modules), held()
os.environ.__class__ = Recorder
import coordinator
print("modules", *sorted(set(sys.modules) - modules))
print("environment", *Recorder.seen)
print("held", held() == before)
print("cuda", torch.cuda.is_initialized())
"""


def run_python(code: str) -> dict[str, list[str]]:
    """Run `code` in a new interpreter with a misspelt variable set; return its printed lines by first word."""
    outcome = subprocess.run(
        [*STRICT, "-c", code],
        check=False,
        cwd=ROOT,
        env={"GROUP_COORDINATOR_X": "1", "RANK": "no number"},
        capture_output=True,
        text=True,
    )
    assert outcome.returncode == 0, outcome.stderr
    return {line.split()[0]: line.split()[1:] for line in outcome.stdout.splitlines()}


@pytest.mark.slow
def test_importing_does_nothing() -> None:
    """`import coordinator` starts no thread, opens no descriptor, reads no variable, touches no GPU, stays light."""
    told = run_python(IMPORT_QUIETLY)
    heavy = {
        "zmq",
        "numpy",
        "transformers",
        "cuda",
        "nccl",
        "triton",
        "hypothesis",
        "pytest",
        "multiprocessing",
    }
    assert {module.partition(".")[0] for module in told["modules"]} & heavy == set()
    assert "coordinator" in told["modules"]
    assert told["environment"] == []
    assert told["held"] == ["True"]
    assert told["cuda"] == ["False"]


def test_importing_the_bottom_layer_loads_no_torch() -> None:
    """`import shm_broadcast` loads neither torch nor zmq."""
    told = run_python("import sys, shm_broadcast; print('modules', *sys.modules)")
    assert {"torch", "zmq", "numpy"} & set(told["modules"]) == set()


# --- the rules themselves -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import cloudpickle as c",
        "import marshal, os",
        "import multiprocessing as mp\nmp.Queue()",
        "from multiprocessing.connection import Pipe",
        "import importlib\nimportlib.import_module('dill')",
        "__import__('shelve')",
        "import torch\ntorch.load(x)",
        "from torch import load",
        "import torch as t\nt.save(x, y)",
        "socket.send_pyobj(x)",
        "self.make().recv_pyobj()",
        "import torch.distributed as dist\ndist.all_gather_object(x, y)",
        "from torch.distributed import broadcast_object_list",
        "from torch import distributed\ndistributed.scatter_object_list",
        "import torch\ntorch.distributed.distributed_c10d._object_to_tensor(x)",
    ],
)
def test_the_rule_finds_pickling(source: str) -> None:
    """Each of these is found."""
    assert rules.pickling(source) != []


def test_the_rule_allows_our_own_objects() -> None:
    """Our own methods that move objects, and a thread queue, are no pickling."""
    assert (
        rules.pickling("import queue\nqueue.Queue()\ngroup.all_gather_object(x)\nself.load(y)\nmsgspec.x(y)")
        == []
    )


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['A']",
        "from os import environ",
        "import os as o\no.getenv('A')",
        "from os import getenv as g\ng('A')",
        "import os\nos.environ.get('A')",
    ],
)
def test_the_rule_finds_the_environment(source: str) -> None:
    """Each of these is found."""
    assert rules.reads_environment(source) != []
    assert rules.reads_environment("import os\nos.getpid()\nself.environ['A']") == []


def test_the_rule_tells_asserts_apart() -> None:
    """A check of a value is found, the narrowing of a type is allowed."""
    assert rules.guarding_asserts("assert rank < 3") != []
    assert rules.guarding_asserts("assert isinstance(x, int) and rank < 3") != []
    assert rules.guarding_asserts("assert isinstance(x, int)\nassert y is not None") == []


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("try: f()\nexcept: pass", True),
        ("try: f()\nexcept Exception: ...", True),
        ("for x in y:\n  try: f()\n  except (OSError, BaseException): continue", True),
        ("def f():\n  try: g()\n  except Exception: return None", True),
        ("with contextlib.suppress(Exception): f()", True),
        ("try: f()\nexcept OSError: pass", False),
        ("try: f()\nexcept Exception as error: log(error)", False),
        ("with contextlib.suppress(OSError): f()", False),
    ],
)
def test_the_rule_finds_swallowed_errors(source: str, is_found: bool) -> None:
    """A broad handler that says nothing is found, a narrow or a speaking one is allowed."""
    assert bool(rules.swallowed_errors(source)) == is_found


def test_the_rule_counts_python_lines() -> None:
    """Blank lines, comments and docstrings do not count; a text that spans lines does."""
    head = '"""Doc."""\n\n# comment\ndef f(\n    a,\n):\n    """Doc.\n\n    More.\n    """\n'
    source = head + '    x = """\n    text\n    """\n    return x\n'
    assert rules.python_code_lines(source) == {4, 5, 6, 11, 12, 13, 14}
    assert rules.python_functions(source) == [("f", 7)]


def test_the_rule_counts_native_lines() -> None:
    """Comments, strings with braces, namespaces and structs confuse it not."""
    source = """
    #include <x>
    namespace {
    /* a { brace
    */
    struct Point { int x; };
    struct Pair {
        int first() const {
            return 1;  // }
        }
    };
    constexpr int table[] = {1, 2};
    static int count(int a, const char* b = "{")
    {
        auto inner = [&](int x) { return x; };
        if (a) { return '{'; }

        const char* text = R"x( } " )x";
        return 1'000;
    }
    }  // namespace
    extern "C" { int other() { return 2; } }
    """
    assert rules.cpp_code_lines(source) == 18
    assert [(head.split("(")[0], lines) for head, lines in rules.cpp_functions(source)] == [
        ("int first", 3),
        ("static int count", 7),
        ("int other", 1),
    ]


def test_the_rule_pairs_synchronisation() -> None:
    """An edge with one end, an unnamed order and a misspelt comment are found."""
    good = {
        "a.cpp": "// SYNC payload->reader (release)\nx.store(1, std::memory_order_release);",
        "b.cpp": "x.load(std::memory_order_acquire);  // SYNC payload->reader (acquire)",
    }
    assert rules.sync_problems(good) == []
    assert rules.sync_problems({"a.cpp": good["a.cpp"]}) == ["edge payload->reader has no acquire end"]
    assert "without a SYNC" in rules.sync_problems({"a.cpp": "x.load(std::memory_order_acquire);"})[0]
    assert "without a SYNC" in rules.sync_problems({"a.cpp": "x.load(std::memory_order::seq_cst);"})[0]
    assert "not of the form" in rules.sync_problems({"a.cpp": "// SYNC payload (release)"})[0]
    assert rules.sync_problems({"a.cpp": "x.load(std::memory_order_relaxed);"}) == []


def test_the_rule_resolves_relative_imports() -> None:
    """A relative import is named by its package, and a lazy one is told from one at the top."""
    source = "from .. import b\nfrom .c import d\ndef f():\n    import torch.x\n"
    found = rules.imports(source, "top.inner")
    assert found == [("top.b", False), ("top.inner.c.d", False), ("torch.x", True)]


def test_no_module_imports_itself_through_others() -> None:
    """Imports between the files of the three packages have no circle, those for types included."""
    graph = grimp.build_graph("coordinator", "device_comm", "shm_broadcast", include_external_packages=False)
    open_ = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    while free := [module for module, imported in open_.items() if not imported & open_.keys()]:
        for module in free:
            del open_[module]
    assert sorted(open_) == []


def test_no_folder_is_crowded() -> None:
    """A folder holds at most 18 modules: more hide what belongs together."""
    assert crowded_folders(count(ROOT)) == {}
