"""The counter of the product's lines of code."""

from pathlib import Path

import pytest

from tests.architecture import count_lines

PYTHON = '''"""A docstring
of two lines."""

import os  # code with a comment

TEXT = """text that is
a value"""  # two lines of code
"""A text that documents TEXT."""


class Thing:
    # only a comment
    size: int = 1
    """What documents an attribute."""

    def name(self):
        """Return it."""
        return (
            self.size,

            os.name,
        )
'''
STUB = '''"""What the core offers."""

def take(
    address: int,
) -> int:
    """Return what was taken."""

NAME: str
'''
CPP = """// a comment
#include <atomic>
/* a comment
   of two lines */

int one() {  /* beside code */
    const char* text = "// no comment";

    return 1;  // code with a comment
}
"""
CUDA = """// a kernel
extern "C" __global__ void add(float* out, const float* in) {
    /* index */
    out[threadIdx.x] += in[threadIdx.x];
}
"""
SAMPLES = {
    "coordinator/thing.py": (PYTHON, 10),
    "coordinator/queues/deep/empty.py": ('"""Nothing but a docstring."""\n', 0),
    "device_comm/_core.pyi": (STUB, 4),
    "device_comm/csrc/one.cpp": (CPP, 5),
    "device_comm/csrc/one.hpp": ("#pragma once\n\nint one();\n", 2),
    "device_comm/csrc/add.cu": (CUDA, 3),
}
NOT_COUNTED = {
    "tests/test_thing.py": "x = 1\n",
    "coordinator/tests/test_thing.py": "x = 1\n",
    "coordinator/DESIGN.md": "text\n",
    "setup.py": "x = 1\n",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a directory that holds the samples, below a folder whose name must not matter."""
    root = tmp_path / "tests" / "checkout"
    for name, text in {**{name: text for name, (text, _) in SAMPLES.items()}, **NOT_COUNTED}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_code_is_counted_and_nothing_else(checkout: Path) -> None:
    """Each language counts its code; comments, docstrings, blank lines, tests and other files do not count."""
    assert count_lines.count(checkout) == {Path(name): lines for name, (_, lines) in SAMPLES.items()}


def test_the_report_adds_up(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each package, a column for each language, and totals of both."""
    assert count_lines.main([str(checkout)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["package", "Python", "stubs", "C++", "CUDA", "total"],
        ["coordinator", "10", "0", "0", "0", "10"],
        ["device_comm", "0", "4", "7", "3", "14"],
        ["shm_broadcast", "0", "0", "0", "0", "0"],
        ["total", "10", "4", "7", "3", "24"],
    ]


def test_details_name_large_files_and_crowded_folders(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The largest files come first, and a folder is named once it holds more than 18 modules."""
    for number in range(count_lines.MOST_MODULES):
        (checkout / "shm_broadcast").mkdir(exist_ok=True)
        (checkout / "shm_broadcast" / f"part_{number}.py").write_text("x = 1\n")
    (checkout / "shm_broadcast" / "_core.pyi").write_text("x: int\n")
    assert count_lines.crowded_folders(count_lines.count(checkout)) == {}
    (checkout / "shm_broadcast" / "one_more.py").write_text("x = 1\n")
    assert count_lines.main(["--details", str(checkout)]) == 0
    _, files, folders = capsys.readouterr().out.split("\n\n")
    assert files.splitlines()[1].split() == ["10", "coordinator/thing.py"]
    assert folders.splitlines()[1].split() == ["19", "shm_broadcast"]


def test_a_directory_without_the_packages_is_refused(tmp_path: Path) -> None:
    """A wrong directory is an error, and no count of zero."""
    with pytest.raises(SystemExit):
        count_lines.main([str(tmp_path)])
