"""The policy file: measured figures beat the built-in table, and errors in a file are named."""

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_comm.cuda.policy.decision import Algorithm, CallFacts, Capacity, GroupFacts, choose, policy_digest
from device_comm.cuda.policy.file import (
    MAX_FILE_BYTES,
    MeasuredThreshold,
    PolicyFile,
    read_policy_file,
    table_of,
    write_policy_file,
)
from device_comm.cuda.policy.table import BUILT_IN
from shm_broadcast.errors import SettingsError

MIB = 1 << 20
H200 = GroupFacts(
    world_size=4,
    device_name="NVIDIA H200",
    arch="sm_90",
    multiprocessors=132,
    has_nvlink=True,
    is_exportable=True,
    capacity=Capacity(push_one_shot=64 * MIB, push_two_shot=64 * MIB),
)
ONE_SHOT = MeasuredThreshold(
    operation="all_reduce", algorithm="push_one_shot", world_size=4, mode="any", max_bytes=1 << 16
)
FILE = PolicyFile(
    version=1,
    device_name="NVIDIA H200",
    arch="sm_90",
    link="nvlink",
    host="host-7",
    driver="580.65.06",
    date="2026-05-31",
    thresholds=(ONE_SHOT, msgspec.structs.replace(ONE_SHOT, algorithm="push_two_shot", max_bytes=4 * MIB)),
)

TEXTS = st.text(min_size=1, max_size=40)
FILES = st.builds(
    PolicyFile,
    version=st.just(1),
    device_name=TEXTS,
    arch=st.sampled_from(["sm_80", "sm_90", "sm_120"]),
    link=st.sampled_from(["nvlink", "pcie"]),
    host=TEXTS,
    driver=TEXTS,
    date=TEXTS,
    thresholds=st.lists(
        st.builds(
            MeasuredThreshold,
            operation=st.just("all_reduce"),
            algorithm=st.sampled_from(["push_one_shot", "push_two_shot", "pull_one_shot", "pull_two_shot"]),
            world_size=st.integers(2, 8),
            mode=st.sampled_from(["graph", "eager"]),
            max_bytes=st.integers(1, 1 << 40),
        ),
        max_size=20,
        unique_by=lambda row: (row.algorithm, row.world_size, row.mode),
    ).map(tuple),
)


@given(FILES)
def test_a_file_says_what_was_written(content: PolicyFile) -> None:
    """A file reads back as written, and no other file is left beside it."""
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "policy.json"
        write_policy_file(path, content)
        assert read_policy_file(path) == content
        assert [each.name for each in Path(directory).iterdir()] == ["policy.json"]


def test_a_file_beats_the_table_where_it_speaks() -> None:
    """Its rows replace those of the same operation and world size, with their source; the rest stays."""
    table = table_of(FILE, H200, "/etc/policy.json")
    call = CallFacts(operation="all_reduce", dtype="float32", nbytes=1 << 16)
    assert table.origin == "/etc/policy.json"
    plan = choose(H200, call, table)
    assert plan.algorithm is Algorithm.PUSH_ONE_SHOT
    assert "measured on host-7, driver 580.65.06, 2026-05-31" in plan.reason
    larger = msgspec.structs.replace(call, nbytes=(1 << 16) + 4)
    assert choose(H200, larger, table).algorithm is Algorithm.PUSH_TWO_SHOT
    assert choose(H200, larger).algorithm is Algorithm.PUSH_ONE_SHOT
    largest = msgspec.structs.replace(call, nbytes=4 * MIB + 4)
    assert choose(H200, largest, table).algorithm is Algorithm.NCCL
    eight = msgspec.structs.replace(H200, world_size=8)
    for nbytes in (1 << 14, 1 << 17, 1 << 18, 8 << 20, 9 << 20):
        each = msgspec.structs.replace(call, nbytes=nbytes)
        assert choose(eight, each, table) == choose(eight, each)
    gather = CallFacts(operation="all_gather", dtype="float32", nbytes=1024)
    assert choose(H200, gather, table) == choose(H200, gather)


def test_digests_are_of_numbers() -> None:
    """The digest depends on the numbers, not on who measured them."""
    digest = policy_digest(table_of(FILE, H200))
    assert digest != policy_digest(BUILT_IN)
    assert policy_digest(table_of(msgspec.structs.replace(FILE, host="other"), H200, "/x")) == digest
    fewer = msgspec.structs.replace(FILE, thresholds=FILE.thresholds[:1])
    assert policy_digest(table_of(fewer, H200)) != digest


@pytest.mark.parametrize(
    "changes", [{"device_name": "NVIDIA B200"}, {"arch": "sm_100"}, {"has_nvlink": False}]
)
def test_a_file_of_another_machine_is_refused(changes: dict[str, Any]) -> None:
    """Figures of other devices or links are refused, and the error shows both."""
    with pytest.raises(SettingsError, match=r"is about NVIDIA H200 \(sm_90, nvlink\), but the group has"):
        table_of(FILE, msgspec.structs.replace(H200, **changes))


def changed(**changes: Any) -> bytes:
    """Return the file's text with some fields changed."""
    return msgspec.json.encode({**msgspec.to_builtins(FILE), **changes})


def with_row(**changes: Any) -> bytes:
    """Return the file's text with one row changed."""
    rows = msgspec.to_builtins(FILE)["thresholds"]
    return changed(thresholds=[{**rows[0], **changes}, rows[1]])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "truncated"),
        (b"{}", "missing required field `version`"),
        (b"\xff\xfe", "malformed"),
        (b"[" * 100_000, "cannot be used"),
        (changed(version=2), "of version 2, this program reads version 1"),
        (changed(extra=1), "unknown field `extra`"),
        (changed(arch="sm_75"), "arch is 'sm_75'"),
        (changed(link="ethernet"), "Invalid enum value 'ethernet'"),
        (changed(host=""), "length >= 1 - at `$.host`"),
        (changed(date="x" * 201), "length <= 200 - at `$.date`"),
        (changed(thresholds=[msgspec.to_builtins(ONE_SHOT)] * 2), "two thresholds in mode graph"),
        (changed(thresholds=[msgspec.to_builtins(ONE_SHOT)] * 1001), "length <= 1000 - at `$.thresholds`"),
        (with_row(algorithm="nccl"), "Invalid enum value 'nccl'"),
        (with_row(operation="all_gather"), "push_one_shot cannot carry all_gather"),
        (with_row(world_size=9), "`int` <= 8 - at `$.thresholds[0].world_size`"),
        (with_row(world_size=1), "`int` >= 2 - at `$.thresholds[0].world_size`"),
        (with_row(max_bytes=0), "`int` >= 1 - at `$.thresholds[0].max_bytes`"),
        (with_row(max_bytes=1 << 41), "`int` <= 1099511627776 - at `$.thresholds[0].max_bytes`"),
        (with_row(max_bytes=1.5), "Expected `int`, got `float`"),
        (b" " * (MAX_FILE_BYTES + 1), "longer than"),
    ],
)
def test_a_wrong_file_is_refused(data: bytes, words: str, tmp_path: Path) -> None:
    """The error names the file, the place and the fault."""
    path = tmp_path / "policy.json"
    path.write_bytes(data)
    with pytest.raises(SettingsError, match="policy.json") as raised:
        read_policy_file(path)
    assert words in str(raised.value)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    """The error names a missing file or directory."""
    with pytest.raises(SettingsError, match="cannot read the policy file .*absent"):
        read_policy_file(tmp_path / "absent")
    with pytest.raises(SettingsError, match="cannot write the policy file .*policy.json"):
        write_policy_file(tmp_path / "absent" / "policy.json", FILE)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (msgspec.structs.replace(FILE, date=""), "date"),
        (msgspec.structs.replace(FILE, host="h" * 201), "host"),
        (msgspec.structs.replace(FILE, host="\ud800"), "surrogates"),
        (
            msgspec.structs.replace(FILE, thresholds=(msgspec.structs.replace(ONE_SHOT, world_size=9),)),
            "world_size",
        ),
        (
            msgspec.structs.replace(FILE, thresholds=(msgspec.structs.replace(ONE_SHOT, max_bytes=0),)),
            "max_bytes",
        ),
    ],
)
def test_what_could_not_be_read_is_not_written(tmp_path: Path, content: PolicyFile, words: str) -> None:
    """A value that reading refuses is refused when it is written; the older file stays."""
    path = tmp_path / "policy.json"
    write_policy_file(path, FILE)
    with pytest.raises(SettingsError, match=words):
        write_policy_file(path, content)
    assert read_policy_file(path) == FILE


def test_writing_fails_whole(tmp_path: Path) -> None:
    """A failed replacement leaves no partial file."""
    (tmp_path / "policy.json").mkdir()
    with pytest.raises(SettingsError, match="cannot write"):
        write_policy_file(tmp_path / "policy.json", FILE)
    assert [each.name for each in tmp_path.iterdir()] == ["policy.json"]


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    """A file that is replaced while others read it is always complete."""
    path = tmp_path / "policy.json"
    other = msgspec.structs.replace(FILE, thresholds=())
    write_policy_file(path, FILE)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            write_policy_file(path, other)
            write_policy_file(path, FILE)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = [read_policy_file(path) for _ in range(50)]
    finally:
        stop.set()
        writer.join()
    assert all(each in (FILE, other) for each in seen)
