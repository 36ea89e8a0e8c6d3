"""The public API changes only on purpose."""

import difflib
from pathlib import Path

from tests.api_snapshot import MODULES, SNAPSHOT, public_api

ROOT = Path(__file__).parents[3]
NO_PACKAGES = {"csrc", "__pycache__"}


def test_the_public_api_is_the_one_written_down() -> None:
    """Names and signatures equal public_api.txt; `make api` rewrites it for an intended change."""
    difference = "\n".join(
        difflib.unified_diff(
            SNAPSHOT.read_text().splitlines(),
            public_api().splitlines(),
            "tests/unit/public_api.txt",
            "the code",
            lineterm="",
        )
    )
    assert not difference, f"{difference}\nIf this is meant, run `make api` and say so in CHANGELOG.md."


def test_every_public_module_is_documented() -> None:
    """The site's API pages describe each module of the snapshot."""
    described = {
        line.removeprefix("::: ").strip()
        for page in (ROOT / "docs" / "api").glob("*.md")
        for line in page.read_text().splitlines()
        if line.startswith("::: ")
    }
    assert sorted(set(MODULES) - described) == []


def test_every_package_says_that_it_is_typed() -> None:
    """Each folder of modules has a py.typed, so that type checkers read the annotations."""
    folders = [
        folder
        for package in ("coordinator", "device_comm", "shm_broadcast")
        for folder in (ROOT / package, *(ROOT / package).rglob("*"))
        if folder.is_dir() and folder.name not in NO_PACKAGES
    ]
    assert len(folders) >= 4
    assert [folder for folder in folders if not (folder / "py.typed").is_file()] == []
