"""A dump: all that pages say, as JSON that decodes back, in a file that its user alone may read."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from coordinator.cli import main
from coordinator.diagnosis.dump import VERSION, Dump, decode_dump, encode_dump, take_dump, write_privately
from coordinator.diagnosis.model import Page
from coordinator.diagnosis.queues import Ring
from shm_broadcast.errors import DecodeError
from shm_broadcast.status.page import own_page
from shm_broadcast.status.shown_calls import ShownCalls
from tests.queues import queue

DOCUMENT = Path(__file__).parents[4] / "docs" / "howto" / "watch-with-top.md"


def test_a_dump_decodes_back_into_the_model() -> None:
    """Pages with all their calls, queues and processes: nothing is lost, and nothing is of another type."""
    shown = ShownCalls("dumped:0", 0, [0, 1])
    lane = shown.status.lane("device", "process group")
    for number in range(300):
        lane.begin(1, number + 1, 4096, 0)
        lane.end(0)
    with queue() as (writer, _):
        writer.enqueue("step")
        dump = take_dump([os.getpid()])
    shown.status.leave()
    assert decode_dump(encode_dump(dump)) == dump
    (page,) = dump.pages
    assert page.pid == os.getpid()
    assert page.process is not None
    assert page.process.command.startswith(("python", "pytest"))
    assert len([record for record in page.page.records if record.group == "dumped:0"]) == 300
    (ring,) = (ring for ring in dump.queues if ring.name == "steps")
    assert [reader.behind_messages for reader in ring.readers] == [1]
    assert (dump.version, dump.refused, dump.faults) == (VERSION, (), {})


def test_a_dump_of_another_version_or_of_no_dump_is_refused() -> None:
    """The error says which version is there."""
    own_page()
    data = json.loads(encode_dump(take_dump([os.getpid()])))
    data["version"] = VERSION + 1
    with pytest.raises(DecodeError, match=f"version {VERSION + 1}"):
        decode_dump(json.dumps(data).encode())
    for other in (b"", b"[]", b'{"version": 1}', b"\xff\xfe", b"[" * 100_000):
        with pytest.raises(DecodeError, match="no dump"):
            decode_dump(other)


def test_words_that_a_later_release_adds_are_ignored() -> None:
    """Within a version the form may grow."""
    own_page()
    dump = take_dump([os.getpid()])
    data = json.loads(encode_dump(dump))
    data["later"] = data["pages"][0]["later"] = 1
    assert decode_dump(json.dumps(data).encode()) == dump


def test_the_document_lists_every_word_of_a_dump() -> None:
    """The how-to has a row for each attribute of the dump, of a page in it, and of a queue."""
    text = DOCUMENT.read_text(encoding="utf-8")
    words = [*Dump.__struct_fields__, *Ring.__struct_fields__]
    assert [word for word in words if f"`{word}`" not in text] == []
    assert f'"version":{VERSION}' in text.replace(" ", "")
    assert [word for word in Page.__struct_fields__ if f"`{word}`" not in text] == []


def test_the_command_prints_a_dump(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """One JSON object and a line break."""
    own_page()
    assert main(["dump", "--pid", str(os.getpid())]) == 0
    printed = capfdbinary.readouterr().out
    assert printed.endswith(b"}\n")
    assert [page.pid for page in decode_dump(printed).pages] == [os.getpid()]


def test_the_command_writes_a_private_file(tmp_path: Path) -> None:
    """With mode 0600 whatever the umask, in place of what was there, and with nothing beside it."""
    own_page()
    out = tmp_path / "dump.json"
    out.write_text("old")
    out.chmod(0o644)
    before = os.umask(0)
    try:
        assert main(["dump", "--out", str(out), "--pid", str(os.getpid())]) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert decode_dump(out.read_bytes()).version == VERSION
    assert list(tmp_path.iterdir()) == [out]


def test_a_file_that_cannot_be_written_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The old file stays whole if the disk is full, and no part of the new one is left."""
    own_page()
    out = tmp_path / "dump.json"
    out.write_text("old")

    def is_full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", is_full)
        assert main(["dump", "--out", str(out), "--pid", str(os.getpid())]) == 1
    assert "No space left" in capsys.readouterr().err
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]
    assert main(["dump", "--out", str(tmp_path / "missing" / "dump.json"), "--pid", str(os.getpid())]) == 1
    assert "No such file" in capsys.readouterr().err


def test_a_link_in_the_place_of_the_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    """What it points to is not written."""
    target, link = tmp_path / "target", tmp_path / "dump.json"
    target.write_text("kept")
    link.symlink_to(target)
    write_privately(link, b"new")
    assert (target.read_text(), link.read_text(), link.is_symlink()) == ("kept", "new", False)


def test_a_process_without_a_page_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The command fails rather than write a dump of nothing."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert main(["dump", "--pid", str(other.pid)]) == 1
        other.communicate(b"\n")
    assert f"process {other.pid} has no status page" in capsys.readouterr().err


def test_the_numbers_of_a_page_fit_json() -> None:
    """Every number of a page is within 64 bits, which all readers of JSON that keep integers can hold."""
    own_page()
    found = msgspec.json.decode(encode_dump(take_dump([os.getpid()])))

    def numbers(value: object) -> list[int]:
        if isinstance(value, dict):
            return [number for each in value.values() for number in numbers(each)]
        if isinstance(value, list):
            return [number for each in value for number in numbers(each)]
        return [value] if isinstance(value, int) else []

    assert all(-(2**63) <= number < 2**64 for number in numbers(found))
