"""The examples in README.md and the pages of the site work: Python blocks run, and commands exist."""

import contextlib
import gc
import importlib.util
import io
import os
import re
import shlex
import shutil
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.harness import RankPool
from tests.markdown import Block, Program, blocks_of, programs_of
from tests.ports import free_port

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [block for page in PAGES for block in blocks_of(page, ROOT)]
PROGRAMS = [program for page in PAGES for program in programs_of(blocks_of(page, ROOT))]
COMMANDS = [block for block in BLOCKS if block.language == "sh"]
DESIGNS = [ROOT / package / "DESIGN.md" for package in ("coordinator", "device_comm", "shm_broadcast")]
LINKED = [*PAGES, *DESIGNS, ROOT / "benchmarks" / "README.md", ROOT / "examples" / "README.md"]
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
DEADLINE_S = 60.0
LAUNCHERS = ("srun", "sbatch", "mpiexec", "kubectl")
SHOWN = {"text", ""}
"""The languages of blocks that hold no code but messages or drawings."""


@contextlib.contextmanager
def torchrun_variables(rank: int, world_size: int, port: int) -> Iterator[None]:
    told = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in told.items()})
    try:
        yield
    finally:
        for name in told:
            del os.environ[name]


def run_program(
    rank: int, world_size: int, directory: Path, source: str, where: str, ranks: int, port: int
) -> str:
    """Run a page's program if this rank is in its world; return its output."""
    if rank >= ranks:
        return ""
    page = Path(where.partition(":")[0])
    module = types.ModuleType("page_" + re.sub(r"\W", "_", where))
    sys.modules[module.__name__] = module  # dataclasses look up their names there
    printed = io.StringIO()
    environment = torchrun_variables(rank, ranks, port) if ranks > 1 else contextlib.nullcontext()
    try:
        with environment, contextlib.redirect_stdout(printed):
            exec(compile(source, str(ROOT / page), "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        # torch keeps compiled functions, which keep the globals of the module that defined them.
        for name in [each for each in module.__dict__ if not each.startswith("__")]:
            del module.__dict__[name]
        gc.collect()
    return printed.getvalue()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.where)
def test_python_blocks_run(program: Program, ranks2: RankPool, ranks4: RankPool) -> None:
    """Each program of a page runs to its end, on as many ranks as its title says."""
    pool = ranks2 if program.ranks <= 2 else ranks4
    # torch keeps the store of a world in which it has compiled a function, or has first trained a module.
    check_leaks = not any(each in program.source for each in ("torch.compile", "DistributedDataParallel"))
    arguments = (program.source, program.where, program.ranks, free_port())
    pool.run(run_program, *arguments, timeout_s=DEADLINE_S, check_leaks=check_leaks)


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: block.where)
def test_commands_exist(block: Block) -> None:
    """Each line of a shell block calls a target of the Makefile, a module, a program or a file that exists."""
    for line in block.code.splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            check_variable(*words.pop(0).split("=", 1))
        if words:
            check_command(words, block)


def check_variable(name: str, value: str) -> None:
    from coordinator.settings import CoordinatorSettings

    if name.startswith("GROUP_COORDINATOR_"):
        CoordinatorSettings.from_env({name: value})
    else:
        assert re.search(rf"^{name} \?=|\$\{{{name}:[-?]|\$\({name}\)", every_script(), re.MULTILINE), name


def every_script() -> str:
    scripts = [ROOT / "Makefile", *sorted((ROOT / "examples").glob("*.sh"))]
    return "".join(path.read_text() for path in scripts)


def check_command(words: list[str], block: Block) -> None:
    program, *arguments = words
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert [word for word in arguments if "=" not in word and word not in targets] == [], block.where
    elif program == "pip":
        check_installation(arguments)
    elif program.startswith("python") and arguments[0] == "-m":
        check_module(arguments[1], arguments[2:])
    elif program == "torchrun":
        scripts = [word for word in arguments if word.endswith(".py")]
        # example.py is a file that the reader makes from the Python block beside the command.
        assert [word for word in scripts if word != "example.py" and not (ROOT / word).is_file()] == []
    elif program in LAUNCHERS:
        check_launched(arguments, block)
    elif program.startswith("examples/"):
        assert os.access(ROOT / program, os.X_OK), program
    else:
        assert program in ("git", "cd") or shutil.which(program), f"{block.where}: {program}"


def check_launched(arguments: list[str], block: Block) -> None:
    """Check the module or the file that another program starts."""
    if "python" in arguments:
        module = arguments[arguments.index("python") + 2]
        assert importlib.util.find_spec(module) is not None, block.where
    else:
        files = [word for word in arguments if word.startswith("examples/")]
        assert files, block.where
        assert all((ROOT / file).is_file() for file in files), block.where


def check_installation(arguments: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [each for word in arguments for part in re.findall(r"\[(.*)\]", word) for each in part.split(",")]
    assert arguments[0] == "install"
    assert [name for name in named if name not in extras] == []


def check_module(module: str, arguments: list[str]) -> None:
    assert importlib.util.find_spec(module) is not None, module
    if module == "coordinator":
        from coordinator.cli import _parser

        _parser().parse_args(arguments)


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_work_in_the_repository(page: Path) -> None:
    """The files to which a page links are in the repository, and no link is one that only the site's builder knows."""
    text = CODE.sub("code", page.read_text())
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    assert [each for each in targets if not (page.parent / each).exists()] == []
    assert re.findall(r"\]\[[^\]]*\]", text) == []


def test_every_block_is_run_or_says_why_not() -> None:
    """Every block is Python, a command or plain text, or its title says why it is not run."""
    skipped = [block for block in BLOCKS if block.reason is not None]
    others = [block.where for block in BLOCKS if block.language not in {"python", "sh"} | SHOWN]
    assert others == []
    assert [block.where for block in skipped if not block.reason] == []
    # Change this number only on purpose.
    assert len(skipped) == SKIPPED, [f"{block.where}: {block.reason}" for block in skipped]
    assert len(PROGRAMS) > 10


SKIPPED = 10
"""They are vLLM's own imports (twice), two captures on a GPU, torch's profiler, a script for two hosts, actors of Ray,
and starts by srun, by mpiexec and in pods."""
