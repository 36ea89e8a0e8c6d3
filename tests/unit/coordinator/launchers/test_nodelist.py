"""Slurm's lists of hosts are expanded in their order, with leading zeros."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.launchers.nodelist import expand_nodelist
from shm_broadcast.errors import UsageError


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("gpu5", ["gpu5"]),
        ("n[001-003,007],gpu5", ["n001", "n002", "n003", "n007", "gpu5"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[9,3]", ["n9", "n3"]),
        ("rack[1-2]n[01-02]-ib.site", ["rack1n01-ib.site", "rack1n02-ib.site", "rack2n01-ib.site", "rack2n02-ib.site"]),
        ("a,b[1],c.d", ["a", "b1", "c.d"]),
        ("n[0]", ["n0"]),
        ("[1-2]", ["1", "2"]),
    ],
)  # fmt: skip
def test_a_list_is_expanded(nodelist: str, names: list[str]) -> None:
    """Ranges, zeros, several brackets, names without brackets."""
    assert expand_nodelist(nodelist) == names


@pytest.mark.parametrize(
    "nodelist",
    ["", ",", "a,", "n[1-2", "n1-2]", "n[]", "n[3-1]", "n[1-]", "n[a]", "n[1,,2]", "(null)", "n[1[2]]", "a b",
     "n[1-2-3]", "n[1-999999999]", "n[1-9999]m[1-9999]", "n[0-1048576]", "n[1-1000000],m[1-1000000]", "ñ1",
     "n[\u0661-\u0663]"],
)  # fmt: skip
def test_what_is_no_list_is_refused(nodelist: str) -> None:
    """A list that names millions of hosts is refused before they take memory."""
    with pytest.raises(UsageError, match="host|range"):
        expand_nodelist(nodelist)


@settings(max_examples=50)
@given(st.text(alphabet="n[]0123,-x.", max_size=12))
def test_any_text_is_a_list_or_refused(text: str) -> None:
    """A list without brackets is what stands between its commas."""
    try:
        names = expand_nodelist(text)
    except UsageError:
        return
    assert names
    assert all(names)
    if "[" not in text:
        assert names == text.split(",")


@settings(max_examples=30)
@given(st.integers(0, 99999), st.integers(0, 30), st.integers(1, 6))
def test_a_range_has_the_width_of_its_first_number(first: int, more: int, width: int) -> None:
    """The numbers are those from the first to the last, padded like the first."""
    padded = f"{first:0{width}d}"
    names = expand_nodelist(f"n[{padded}-{first + more}]")
    assert [int(name[1:]) for name in names] == list(range(first, first + more + 1))
    assert all(len(name) > width or len(name) == len(padded) + 1 for name in names)
    assert names[0] == f"n{padded}"
