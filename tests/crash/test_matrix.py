"""Every kind of call, with a rank that is hit by a signal in every state, ends as the table in `matrix.md` says."""

import itertools
import re
from pathlib import Path

import pytest

from tests.crash.matrix_cells import RANKS, VICTIMS, Sender, live_in_a_cell, witnesses
from tests.harness import run_ranks

pytestmark = pytest.mark.proof

PAGE = Path(__file__).with_name("matrix.md")
PLACES = ["idle", "waiting", "mid-copy"]
PLANES = [
    *("queue", "collective", "channel", "call between hosts", "Gloo collective", "Gloo message"),
    *("creation", "destroy"),
]
SIGNALS = ["SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT"]
SAMPLE = [
    ("queue", "waiting", "first", "SIGKILL"),
    ("queue", "mid-copy", "other", "SIGKILL"),
    ("collective", "mid-copy", "other", "SIGKILL"),
    ("collective", "waiting", "first", "SIGSTOP"),
    ("channel", "idle", "other", "SIGTERM"),
    ("call between hosts", "waiting", "other", "SIGINT"),
    ("Gloo collective", "mid-copy", "other", "SIGKILL"),
    ("Gloo message", "mid-copy", "first", "SIGKILL"),
    ("creation", "waiting", "first", "SIGKILL"),
    ("destroy", "mid-copy", "other", "SIGSTOP"),
    ("destroy", "waiting", "other", "SIGINT"),
    ("collective", "waiting", "all", "SIGINT"),
]


def read_table() -> dict[tuple[str, str, str, str], str]:
    """Return the expected end of every cell."""
    found = {}
    for line in PAGE.read_text().splitlines():
        fields = [field.strip() for field in line.strip("| ").split("|")]
        if len(fields) == 3 + len(SIGNALS) and fields[0] in PLANES:
            for name, expected in zip(SIGNALS, fields[3:], strict=True):
                found[fields[0], fields[1], fields[2], name] = expected
    return found


TABLE = read_table()


def test_the_table_has_every_cell() -> None:
    """Each plane, place, victim and signal has its expected end, and each word of the table is explained."""
    assert set(TABLE) == set(itertools.product(PLANES, PLACES, VICTIMS, SIGNALS))
    explained = re.findall(r"^\* \*([\w ]+)\*:", PAGE.read_text(), re.MULTILINE)
    assert {word for expected in TABLE.values() for word in expected.split(" or ")} == set(explained)


def check_cell(tmp_path: Path, cell: tuple[str, str, str, str]) -> None:
    """Run a cell and compare what the witnesses got, or the victims where there is no witness."""
    plane, _, hit, name = cell
    victims = VICTIMS[hit]
    dead = victims if name != "SIGINT" else []
    found = run_ranks(
        live_in_a_cell,
        RANKS,
        *cell,
        str(tmp_path),
        expect_dead=dead,
        timeout_s=90.0,
        while_running=Sender(tmp_path, *cell),
    )
    expected = TABLE[cell]
    # Descriptors, mappings, threads and children are as before.
    assert [each["left"] for each in found if each] == [[]] * (RANKS - len(dead)), found
    if expected == "all end":
        assert found == [None] * RANKS
    elif hit == "all":
        assert expected == "each stops"
        kinds = {"KeyboardInterrupt", "PeerLostError", "GroupBrokenError", "ClosedError"}
        assert {each["kind"] for each in found} <= kinds, found
        assert "KeyboardInterrupt" in {each["kind"] for each in found}, found
    else:
        ends = {
            "lost": ("PeerLostError", victims),
            "late": ("CommTimeoutError", victims),
            "late then closed": ("CommTimeoutError", victims),
            "closed": ("ClosedError", []),
            "done": ("done", []),
        }
        wanted = [ends[word] for word in expected.split(" or ")]
        for rank in witnesses(plane, victims):
            assert (found[rank]["kind"], found[rank]["ranks"]) in wanted, (rank, found)
        if plane == "queue" and hit == "other":
            second = ends["closed"] if expected == "late then closed" else ends[expected]
            assert (found[1]["kind"], found[1]["ranks"]) == second, found


@pytest.mark.parametrize("cell", SAMPLE, ids=" ".join)
def test_a_sample_of_the_table_holds(tmp_path: Path, cell: tuple[str, str, str, str]) -> None:
    """Cells of every plane, place, victim and signal end as the table says; the rest is in `make test-thorough`."""
    check_cell(tmp_path, cell)


@pytest.mark.thorough
@pytest.mark.parametrize("cell", [cell for cell in TABLE if cell not in SAMPLE], ids=" ".join)
def test_every_cell_of_the_table_holds(tmp_path: Path, cell: tuple[str, str, str, str]) -> None:
    """Every other cell ends as the table says."""
    check_cell(tmp_path, cell)
