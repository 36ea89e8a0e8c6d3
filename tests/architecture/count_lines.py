"""Counts the product's lines of code in a checkout: `python -m tests.architecture.count_lines [--details] [DIR]`.

Comments, docstrings and blank lines do not count, and neither do tests. DIR may be another checkout: one counter then
compares two commits.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from tests.architecture import rules

__all__ = ["LANGUAGES", "MOST_MODULES", "PACKAGES", "code_lines", "count", "crowded_folders", "report"]

ROOT = Path(__file__).parents[2]
PACKAGES = ("coordinator", "device_comm", "shm_broadcast")
LANGUAGES = {
    ".py": "Python",
    ".pyi": "stubs",
    ".c": "C++",
    ".cc": "C++",
    ".cpp": "C++",
    ".h": "C++",
    ".hpp": "C++",
    ".cu": "CUDA",
    ".cuh": "CUDA",
}
MOST_MODULES = 18
"""A folder with more modules than this hides the architecture of its package."""


def code_lines(path: Path) -> int:
    """Return the number of lines of code in a source file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix in (".py", ".pyi"):
        return len(rules.python_code_lines(source))
    return rules.cpp_code_lines(source)


def count(root: Path) -> dict[Path, int]:
    """Return the lines of code of each source file in the three packages, by path relative to `root`."""
    return {
        path.relative_to(root): code_lines(path)
        for package in PACKAGES
        for path in sorted((root / package).rglob("*"))
        if path.suffix in LANGUAGES and path.is_file() and "tests" not in path.parts[len(root.parts) :]
    }


def crowded_folders(counted: dict[Path, int]) -> dict[Path, int]:
    """Return the folders with more than `MOST_MODULES` modules, and how many each has; stubs do not count."""
    modules = Counter(path.parent for path in counted if path.suffix != ".pyi")
    return {folder: number for folder, number in sorted(modules.items()) if number > MOST_MODULES}


def report(counted: dict[Path, int], largest: int = 0) -> list[str]:
    """Format a table by package and language, and with `largest` also the largest files and the crowded folders."""
    languages = list(dict.fromkeys(LANGUAGES.values()))
    sums: Counter[tuple[str, str]] = Counter()
    for path, size in counted.items():
        for package in (path.parts[0], "total"):
            for language in (LANGUAGES[path.suffix], "total"):
                sums[package, language] += size
    columns = [*languages, "total"]
    lines = [f"{'package':<16}" + "".join(f"{name:>9}" for name in columns)]
    lines += [
        f"{package:<16}" + "".join(f"{sums[package, name]:>9}" for name in columns)
        for package in (*PACKAGES, "total")
    ]
    if largest:
        by_size = sorted(counted.items(), key=lambda each: (-each[1], each[0]))
        lines += ["", "largest files", *(f"{size:>9}  {path}" for path, size in by_size[:largest])]
        crowded = crowded_folders(counted)
        lines += ["", f"folders with more than {MOST_MODULES} modules"]
        lines += [f"{number:>9}  {folder}" for folder, number in crowded.items()] or ["     none"]
    return lines


def main(arguments: list[str]) -> int:
    """Print the report of a checkout; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.architecture.count_lines", description=__doc__)
    parser.add_argument(
        "directory", nargs="?", type=Path, default=ROOT, help="a checkout (default: this one)"
    )
    parser.add_argument(
        "--details", action="store_true", help="also show the largest files and crowded folders"
    )
    chosen = parser.parse_args(arguments)
    counted = count(chosen.directory)
    if not counted:
        parser.error(f"{chosen.directory} holds none of {', '.join(PACKAGES)}")
    print(*report(counted, largest=15 if chosen.details else 0), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
