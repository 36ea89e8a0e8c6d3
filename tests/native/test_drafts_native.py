"""Drafts and rehearsals inside one process: what else may happen to a port meanwhile, and what never does."""

import gc
import mmap
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from shm_broadcast import _core, codec
from tests.queues import PAGE, RECORD_HEADER, bare_ring

LINES = [["a" * 50] * 10, ["b" * 50] * 10]
"""Enough to be shown."""
PREFIX = 32
DRAFT = 104


class Acting(TorchFunctionMode):
    """Acts once, when something is first asked of a tensor: as a finalizer may at any time."""

    def __init__(self, act: Callable[[], object]) -> None:
        """Do `act`."""
        super().__init__()
        self._acts = [act]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Act, then do what was asked."""
        if self._acts:
            self._acts.pop()()
        return func(*args, **(kwargs or {}))


def ends() -> tuple[mmap.mmap, _core.WritePort, _core.ReadPort]:
    """Return a ring and both of its ends, with the adapters loaded."""
    codec.encode(torch.zeros(1))
    memory = bare_ring(64 * PAGE)
    return memory, _core.WritePort(memory, codec.describe), _core.ReadPort(memory, 0, codec.build_owned)


def received(reader: _core.ReadPort) -> list[Any]:
    """Return all messages that are there."""
    return list(iter(lambda: reader.receive(0, 0, 0), _core.NOTHING))


@pytest.mark.guarantee("B23")
@pytest.mark.parametrize("way", ["port", "general way"])
def test_a_message_that_is_sent_while_another_is_encoded_comes_first(way: str) -> None:
    """Both arrive as they were sent, though the lines of the one stood where the other was written."""
    memory, writer, reader = ends()
    other = [["x" * 40] * 30, {"step": 7}]

    def act() -> None:
        assert memory[DRAFT : DRAFT + 8] != bytes(8)
        if way == "port":
            assert writer.send(other)
        else:
            frame = codec.encode(other).to_bytes()
            writer.hold(True)
            assert _core.ring_write(memory, frame, (), 0, 0, 0) == len(frame)
            writer.hold(False)

    message = [*LINES, torch.zeros(2), *LINES]
    with Acting(act):
        assert writer.send(message)
    first, second = received(reader)
    assert first == other
    assert second[:2] == second[3:] == LINES
    assert memory[DRAFT : DRAFT + 8] == bytes(8)


@pytest.mark.guarantee("B23")
def test_a_send_may_end_while_a_younger_one_encodes() -> None:
    """It is published where the lines of the younger one stand, which is then written anew behind it; tags are kept."""
    began, shown = threading.Event(), threading.Event()

    def describe(_obj: object) -> Any:
        began.set()
        assert shown.wait(10.0)
        return 0, None, "older"

    memory, _, reader = ends()
    writer = _core.WritePort(memory, describe)
    writer.tag = 5
    older = threading.Thread(target=writer.send, args=([*LINES, object()],))
    older.start()
    assert began.wait(10.0)

    def act() -> None:
        assert memory[DRAFT : DRAFT + 8] != bytes(8)
        writer.tag = 9
        shown.set()
        older.join(10.0)

    message = [["c" * 50] * 20, torch.zeros(2), *LINES]
    writer.tag = 7
    with Acting(act):
        assert writer.send(message)
    assert reader.receive(0, 0, 0) == [*LINES, "older"]
    assert reader.tag == 5
    second = reader.receive(0, 0, 0)
    assert (second[0], second[2:], reader.tag) == (message[0], LINES, 7)


@pytest.mark.guarantee("B23")
def test_a_forked_child_shows_nothing_of_what_its_parent_encodes() -> None:
    """A child that is forked while an object is encoded leaves the ring as it was."""
    memory, writer, reader = ends()
    private = memory[:]
    children: list[int] = []

    def act() -> None:
        nonlocal private
        private = memory[:]
        children.append(os.fork())
        if children[0] > 0:
            assert os.waitpid(children[0], 0)[1] == 0
            assert memory[:] == private

    message = [*LINES, torch.zeros(2), ["d" * 60] * 20]
    with Acting(act):
        sent = writer.send(message)
    if children == [0]:
        os._exit(1 if sent else 0)
    assert sent
    assert received(reader)[0][3] == message[3]


@pytest.mark.guarantee("B23")
@pytest.mark.parametrize("what", ["close", "hold"])
def test_a_port_that_is_closed_or_held_while_it_encodes_sends_nothing(what: str) -> None:
    """The draft is left alone, and the memory that may be gone is not touched."""
    memory, writer, reader = ends()
    act = writer.close if what == "close" else lambda: writer.hold(True)
    message = [*LINES, torch.zeros(2), *LINES]
    with Acting(act):
        assert writer.send(message) is False
    assert received(reader) == []
    frame = codec.encode(LINES).to_bytes()
    assert _core.ring_write(memory, frame, (), 0, 0, 0) == len(frame)
    assert received(reader) == [LINES]
    assert memory[DRAFT : DRAFT + 8] == bytes(8)


def test_ctrl_c_while_a_tensor_is_looked_at_goes_up() -> None:
    """It is no reason to describe the tensor in another way; an ordinary exception is."""
    _, writer, reader = ends()

    def interrupt() -> None:
        raise KeyboardInterrupt

    def fail() -> None:
        raise RuntimeError("not now")

    message = [torch.ones(2)]
    for encode in (codec.encode, writer.send):
        with Acting(interrupt), pytest.raises(KeyboardInterrupt):
            encode(message)
    with Acting(fail):
        assert writer.send(message)
    assert torch.equal(received(reader)[0][0], message[0])


@pytest.mark.guarantee("B23")
def test_a_draft_shows_nothing_but_the_message() -> None:
    """What is not known yet, the prefix of the frame, is zero: no memory of the writer's is shown."""
    memory, writer, _ = ends()
    assert writer.send([*LINES, object()]) is False
    payload = PAGE + RECORD_HEADER
    assert memory[payload : payload + PREFIX] == bytes(PREFIX)
    assert memory[payload + PREFIX + 1 : payload + PREFIX + 10].endswith(b"aaa")
    assert memory[DRAFT : DRAFT + 8] == bytes(8)


def test_a_rehearsal_runs_nothing_of_the_application() -> None:
    """A reader that polls decodes the last message again now and then; no collection of garbage begins by that."""
    _, writer, reader = ends()
    message = {"ids": [[each] for each in range(40)]}
    assert writer.send(message)
    assert reader.receive(0, 0, 0) == message
    runs: list[object] = []
    gc.collect()
    threshold = gc.get_threshold()
    gc.callbacks.append(lambda *arguments: runs.append(arguments))
    gc.set_threshold(10)
    try:
        assert reader.receive(20_000_000, 0, 0) is _core.NOTHING
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.pop()
    assert reader.rehearsed > 0
    assert len(runs) < reader.rehearsed
    assert gc.isenabled()
    assert writer.send([torch.ones(600)])
    assert torch.equal(reader.receive(0, 0, 0)[0], torch.ones(600))
    before = reader.rehearsed
    assert reader.receive(5_000_000, 0, 0) is _core.NOTHING
    assert reader.rehearsed == before
