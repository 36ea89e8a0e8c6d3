"""CUDA_VISIBLE_DEVICES is read as CUDA documents it, and what it hides has a reason."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_comm.visible_devices import (
    MigInstance,
    PhysicalDevice,
    plugged_in,
    select_device,
    visible_devices,
)
from shm_broadcast.errors import SettingsError

UUIDS = [
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "GPU-8932aaaa-0000-0000-0000-000000000001",
    "GPU-ff000000-0000-0000-0000-000000000002",
    "GPU-0a000000-0000-0000-0000-000000000003",
]
PLAIN = [PhysicalDevice(ordinal, uuid) for ordinal, uuid in enumerate(UUIDS)]
PARTS = (
    MigInstance("MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", 1, 0),
    MigInstance("MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb", 2, 0),
    MigInstance("MIG-1e3856af-9b3c-5b0c-a6f9-000000000000", 2, 1),
)
CUT = [
    PhysicalDevice(0, UUIDS[0], True, PARTS),
    PhysicalDevice(1, UUIDS[2]),
    PhysicalDevice(2, UUIDS[3], True),
]


@pytest.mark.parametrize(
    ("text", "ordinals", "why"),
    [
        (None, [0, 1, 2, 3], ""),
        ("", [], ""),
        ("  ", [], ""),
        ("2,1", [2, 1], ""),
        (" 3 , 0 ", [3, 0], ""),
        ("0,2,-1,1", [0, 2], "ends the list"),
        ("-1", [], "ends the list"),
        ("0,4,1", [0], "no device 4"),
        ("0,x,1", [0], "neither a number"),
        ("0,,1", [0], "neither a number"),
        ("NoDevFiles", [], "neither a number"),
        ("0,1,0", [], "came before"),
        ("1,GPU-8932a", [], "came before"),
        (UUIDS[2], [2], ""),
        ("GPU-ff,GPU-0a,GPU-8932f", [2, 3, 0], ""),
        ("gpu-FF,1", [2, 1], ""),
        ("GPU-ff,GPU-8932", [2], "names 2 devices"),
        ("GPU-ff,GPU-77", [2], "no device 'GPU-77'"),
        ("GPU-", [], "names 4 devices"),
        (UUIDS[0].removeprefix("GPU-"), [], "neither a number"),
    ],
)
def test_whole_devices(text: str | None, ordinals: list[int], why: str) -> None:
    """Ordinals and UUIDs, also short ones; what cannot be read ends the list, what comes twice empties it."""
    visible = visible_devices(text, PLAIN)
    assert [device.physical.ordinal for device in visible.devices] == ordinals
    assert all(device.instance is None for device in visible.devices)
    assert why in visible.ended
    assert bool(why) == bool(visible.ended)


@pytest.mark.parametrize(
    ("text", "uuids", "why"),
    [
        (PARTS[1].uuid, [PARTS[1].uuid], ""),
        ("MIG-cba6", [PARTS[1].uuid], ""),
        (f"MIG-{UUIDS[0]}/2/1", [PARTS[2].uuid], ""),
        ("MIG-GPU-8932f937/1/0", [PARTS[0].uuid], ""),
        (f"MIG-{UUIDS[0]}/7/0", [], "no device"),
        ("MIG-c", [], "names 2 devices"),
        ("0", [PARTS[0].uuid], ""),
        (UUIDS[0], [PARTS[0].uuid], ""),
        (f"{PARTS[1].uuid},{PARTS[0].uuid}", [PARTS[1].uuid], "sees one"),
        (f"{PARTS[1].uuid},1", [PARTS[1].uuid], "sees one"),
        (f"1,{PARTS[1].uuid}", [UUIDS[2]], "sees one"),
        ("2,1", [UUIDS[2]], "without an instance"),
        (None, [PARTS[0].uuid], "sees one"),
    ],
)
def test_parts_of_devices(text: str | None, uuids: list[str], why: str) -> None:
    """MIG instances by UUID, by their place in a GPU, or as its first; a process sees one of them."""
    visible = visible_devices(text, CUT)
    assert [device.uuid for device in visible.devices] == uuids
    assert why in visible.ended
    assert bool(why) == bool(visible.ended)


def test_a_missing_device_is_an_error_that_says_why() -> None:
    """The error shows the variable, how many devices it leaves, and the entry at which CUDA stopped."""
    assert select_device("2,0", PLAIN, 1).uuid == UUIDS[0]
    with pytest.raises(
        SettingsError, match=r"no device 1: CUDA_VISIBLE_DEVICES is '2,9', .* 1 of 4 .* device 9"
    ):
        select_device("2,9", PLAIN, 1)
    with pytest.raises(SettingsError, match="is not set, which shows 4 of 4"):
        select_device(None, PLAIN, 4)
    with pytest.raises(SettingsError, match="no device -1"):
        select_device("0", PLAIN, -1)


@given(st.text(alphabet="0123-+,GPUMIG/ abcdef\n\u0663", max_size=40), st.sampled_from([PLAIN, CUT, []]))
def test_any_text_gives_a_list(text: str, inventory: list[PhysicalDevice]) -> None:
    """Whatever stands in the variable, no device comes twice and nothing is raised."""
    visible = visible_devices(text, inventory)
    uuids = [device.uuid for device in visible.devices]
    assert len(set(uuids)) == len(uuids) <= len(inventory)


def test_the_kernel_driver_tells_what_is_plugged_in(tmp_path: Path) -> None:
    """By bus, whatever else stands there; nothing where there is no driver."""
    for bus, uuid in (("0000:41:00.0", "GPU-bbbb"), ("0000:01:00.0", "GPU-aaaa"), ("0000:61:00.0", "none")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(
            f"Model: \t NVIDIA H200\nGPU UUID: \t {uuid}\nIRQ:  \t 16\n"
        )
    (tmp_path / "0000:81:00.0").mkdir()
    assert [(each.ordinal, each.uuid) for each in plugged_in(tmp_path)] == [(0, "GPU-aaaa"), (1, "GPU-bbbb")]
    assert plugged_in(tmp_path / "missing") == []
