"""CONTRIBUTING.md leads to files that exist, and every sub-package is on its map."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
NAMED = sorted(
    set(re.findall(r"`((?:coordinator|device_comm|shm_broadcast|tests|benchmarks)/[\w./-]*)`", PAGE))
)


def test_every_file_and_folder_of_the_page_exists() -> None:
    """A reader who follows the page finds each file and folder that it names."""
    assert len(NAMED) >= 40
    assert [name for name in NAMED if not (ROOT / name).exists()] == []


def test_the_map_shows_every_package() -> None:
    """Each folder with modules, down to two levels, has a row in the table."""
    packages = ("coordinator", "device_comm", "shm_broadcast")
    folders = {path.parent for package in packages for path in (ROOT / package).glob("*/__init__.py")}
    assert folders
    missing = [folder for folder in folders if f"`{folder.relative_to(ROOT)}/`" not in PAGE]
    assert missing == []


def test_the_page_describes_five_changes() -> None:
    """Each of the five worked changes names the files that it touches."""
    section = PAGE.split("## Five changes")[1].split("\n## ")[0]
    changes = re.findall(r"^\*\*([^*]+)\.\*\*(.*?)(?=^\*\*|\Z)", section, re.MULTILINE | re.DOTALL)
    assert [title for title, _ in changes] == [
        "Add an operation",
        "Change the wait strategy",
        "Add a metric per operation",
        "Add a transport for remote readers",
        "Add a CUDA algorithm",
    ]
    for title, text in changes:
        files = {name for name in NAMED if f"`{name}`" in text}
        products = {name for name in files if not name.startswith("tests/")}
        assert products < files
        assert 1 <= len(products) <= 13, (title, products)
