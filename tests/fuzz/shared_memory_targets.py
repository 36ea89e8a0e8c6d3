"""Headers of a group's shared memory that native code reads: the region, the status board and the table of channels."""

import itertools
import struct
from collections import Counter

import numpy as np
import torch

from device_comm import _core
from device_comm.cpu.status_board import StatusBoard
from shm_broadcast.reports.arrivals import Arrival
from shm_broadcast.reports.failure_record import FailureRecord
from tests.fuzz.target import Target

__all__ = ["block_of", "board_target", "channels_target", "region_target"]

RANKS = 2
SLOT = 4096
ENTRY = 4096
"""Bytes of the board's head, and of each rank's entry behind it."""
ENTRY_KEPT = 384 + 8 + 400
"""The calls of an entry, and the length and beginning of its record."""
PLANES = ("shared", "shared host", "device", "host", "nccl")


def block_of(nbytes: int) -> memoryview:
    """Return zeros in a block of exactly this size: the sanitizer sees who goes one byte beyond it."""
    return np.zeros(nbytes, np.uint8).data


def region_target() -> Target:
    """Return the calls of one rank on a region whose header and posts are changed."""
    nbytes = _core.segment_bytes(RANKS, SLOT)
    memory = bytearray(nbytes)
    _core.lay_out(memory, RANKS, SLOT, 7)
    fresh = bytes(memory[:4096])
    _core.SharedRegion(memory, 1).barrier()
    seeds = [fresh[:640], bytes(memory[:640])]
    source, result = torch.ones(100), torch.ones(100)
    met: Counter[str] = Counter()
    block = block_of(nbytes)

    def run(data: bytes, number: int) -> None:
        is_long = number % 20_001 == 0
        changed = block_of(nbytes) if is_long else block
        changed[:640] = data
        end = _core.SharedRegion(changed, 0)
        met["missing" if end.missing() else "none missing"] += 1
        met["last calls"] += any(end.last_calls())
        if not is_long:
            return
        # A call that lacks the other rank's post returns after 50 ms.
        end.barrier()
        met["pending"] += end.resume(0) == _core.PENDING
        end.missing()
        end.last_calls()
        other = _core.SharedRegion(changed, 0)
        other.reduce(_core.ALL_REDUCE_ONE_SHOT, source.data_ptr(), result.data_ptr(), 100, 6, 0, 0)
        other.resume(0)
        other.disagreement()

    results = ("accepted", "ValueError", "none missing", "last calls", "pending")
    return Target("region", seeds, run, (ValueError,), is_fixed=True, results=results, met=met)


def board_target() -> Target:
    """Return what one rank asks a changed status board; a record that is none is left out, so nothing is raised."""
    nbytes = _core.board_bytes(RANKS)
    kept = [range(64), *(range(at, at + ENTRY_KEPT) for at in range(ENTRY, nbytes, ENTRY))]
    seeds = []
    for has_record in (False, True):
        memory = block_of(nbytes)
        for rank in range(RANKS):
            board = StatusBoard(memory, range(RANKS), rank)
            for number, plane in enumerate(PLANES):
                board.arrive(plane, Arrival("all_reduce", number + 1))
            if has_record:
                board.publish(FailureRecord("lost", (rank,), 1 - rank, "barrier #3", detail="x" * 100))
        board.leave()
        seeds.append(b"".join(memory[place.start : place.stop] for place in kept))
    met: Counter[str] = Counter()
    memory, zeros, own = block_of(nbytes), bytes(nbytes), FailureRecord("lost", (1,), 0, "barrier #4")
    converted: set[object] = set()

    def run(data: bytes, number: int) -> None:
        memory[:], at = zeros, 0
        for place in kept:
            memory[place.start : place.stop] = data[at : at + len(place)]
            at += len(place)
        board = StatusBoard(memory, range(RANKS), 0)
        text = _core.board_record(memory, RANKS)
        found = board.failure_record()
        met["record" if found else "malformed record" if text else "no record"] += 1
        for index, plane in enumerate(PLANES):
            # Python's part depends on nothing else than what the native part returns, which mostly was there before.
            native = tuple(_core.board_arrivals(memory, RANKS, index))
            if native not in converted:
                converted.add(native)
                met["arrivals" if board.arrivals(plane) else "no arrivals"] += 1
        met["left" if board.left() else "not left"] += 1
        met["own record" if board.publish(own) == own else "earlier record"] += 1
        if number % 100 == 0:
            converted.clear()
            board.close()
            if board.failure_record() or board.arrivals("host") or board.left():
                raise AssertionError("a closed board holds something")

    results = ["accepted", "record", "malformed record", "no record", "own record", "earlier record"]
    results += ["arrivals", "no arrivals", "left", "not left"]
    return Target("board", seeds, run, (), is_fixed=True, results=results, met=met)


def channels_target() -> Target:
    """Return what one rank asks a changed table of channels: each word of it is a state, and no state is refused."""
    nbytes = _core.channel_table_bytes(RANKS)
    states = (_core.CHANNEL_NONE, _core.CHANNEL_MAKING, _core.CHANNEL_READY)
    words = (nbytes - RANKS * _core.BELL_BYTES) // 4 - RANKS
    seeds = []
    for left, state in itertools.product((0, 1), states):
        memory = block_of(nbytes)
        at = RANKS * _core.BELL_BYTES
        struct.pack_into(f"<{RANKS + words}I", memory, at, *[left] * RANKS, *[state] * words)
        seeds.append(bytes(memory))
    met: Counter[str] = Counter()

    names = {state: f"state {state}" for state in states}
    memory, pairs = block_of(nbytes), tuple(itertools.product(range(RANKS), repeat=2))

    def failing() -> None:
        raise InterruptedError

    def making() -> str:
        return "memory"

    def run(data: bytes, number: int) -> None:
        memory[:] = data
        for src, dst in pairs:
            met[names.get(_core.channel_state(memory, RANKS, src, dst), "unknown state")] += 1
            try:
                _core.channel_open(memory, RANKS, src, dst, failing)
            except InterruptedError:
                met["not made"] += 1
            found, made = _core.channel_open(memory, RANKS, src, dst, making)
            met["made" if made else "there"] += 1
            if made != ("memory" if found == _core.CHANNEL_NONE else None):
                raise AssertionError(f"state {found} gave {made}")
        for rank in range(RANKS):
            met["left" if _core.channel_left(memory, RANKS, rank) else "not left"] += 1
            _core.channel_leave(memory, RANKS, rank)

    results = ["accepted", *(f"state {state}" for state in states), "unknown state"]
    results += ["made", "not made", "there", "left", "not left"]
    return Target("channels", seeds, run, (), is_fixed=True, results=results, met=met)
