"""The public API changes only on purpose."""

import difflib
from pathlib import Path

from tests.api_snapshot import MODULES, SNAPSHOT, public_api

ROOT = Path(__file__).parents[3]


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
    """Each of the three packages has a py.typed, which holds for its sub-packages too (PEP 561)."""
    packages = ("coordinator", "device_comm", "shm_broadcast")
    assert [package for package in packages if not (ROOT / package / "py.typed").is_file()] == []
