"""How often the leaders of hosts swap in an all-reduce: a function of what all ranks know, so that all choose alike."""

import math
import socket
import struct
import time
import types
from typing import Any, cast

import pytest
import torch

from device_comm.cpu.several_hosts.leaders import Call, Leaders
from device_comm.cpu.several_hosts.levels import takes_one_swap
from device_comm.cpu.several_hosts.line import UNMEASURED_BYTES, measured_worth_bytes, worth_bytes
from device_comm.cpu.several_hosts.wires import Wire
from device_comm.health import Operation
from shm_broadcast.errors import CommTimeoutError
from tests.unit.device_comm.test_health import Group

WORTH = 62_500


@pytest.mark.guarantee("D16")
@pytest.mark.parametrize(("hosts", "nbytes"), [(3, 93_748), (4, 41_664), (8, 11_904), (16, 4_760)])
def test_more_hosts_share_smaller_results(hosts: int, nbytes: int) -> None:
    """One swap sends to every host; what another one saves of 62,500 bytes and more is worth it."""
    for more, is_one in ((0, True), (8, False)):
        partial = torch.empty((nbytes + more) // 4)
        assert takes_one_swap(hosts, partial, torch.float32, WORTH) is is_one
        # Half of it is all that two swaps send of the result in the second one.
        assert not takes_one_swap(hosts, torch.empty((nbytes + 8) // 4), torch.bfloat16, WORTH)


@pytest.mark.guarantee("D16")
@pytest.mark.parametrize(
    ("dtype", "nbytes", "is_one"),
    [
        (torch.float32, 64 << 20, True),
        (torch.bfloat16, 250_000, True),
        (torch.bfloat16, 250_004, False),
        (torch.float8_e4m3fn, 1 << 20, False),
    ],
)
def test_two_hosts_share_what_is_wider_than_its_result(dtype: torch.dtype, nbytes: int, is_one: bool) -> None:
    """Of equal widths, two swaps would send as many bytes as one."""
    assert takes_one_swap(2, torch.empty(nbytes // 4), dtype, WORTH) is is_one


@pytest.mark.guarantee("D16")
def test_what_a_swap_is_worth_is_what_the_line_carries_meanwhile() -> None:
    """It stays between 8 KiB and 1 MiB; without a measurable rate it is that of a common line."""
    assert worth_bytes(50e-6, 1.25e9) == 62_500
    assert worth_bytes(1e-6, 1e9) == 8 << 10
    assert worth_bytes(1.0, 1e9) == 1 << 20
    assert worth_bytes(50e-6, math.inf) == UNMEASURED_BYTES == 62_500


class StubLeaders:
    """Stands for leaders whose swap takes 1 ms, and 9 ms more for 262,144 bytes to all others together."""

    def __init__(self, others: int) -> None:
        self.others = list(range(1, 1 + others))
        self.now = 0.0

    def swap(self, call: Call, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]) -> float:
        assert list(sends) == list(receives) == self.others
        return 0.001 + 0.009 * (sum(each.numel() for each in sends.values()) > 1000)

    def wait(self, call: Call, swap: float) -> None:
        self.now += swap


@pytest.mark.guarantee("D16")
@pytest.mark.parametrize("others", [1, 3])
def test_the_slowest_leader_counts(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each leader tells what it measured; all ranks, those that lead nobody too, draw the same conclusion."""
    leaders = StubLeaders(others)
    monkeypatch.setattr(time, "monotonic", lambda: leaders.now)
    told: list[bytes] = []

    def exchange(own: bytes) -> list[bytes]:
        told.append(own)
        return [own, b"", struct.pack("<dd", 0.004, 1e9), struct.pack("<dd", 0.0001, 20e6)]

    call: Any = types.SimpleNamespace(view="")
    assert measured_worth_bytes(cast("Leaders", leaders), call, exchange) == pytest.approx(0.004 * 20e6)
    length = (256 << 10) // others * others
    assert struct.unpack("<dd", told[0]) == pytest.approx((0.001, length / 0.009))
    assert measured_worth_bytes(None, call, exchange) == pytest.approx(0.004 * 20e6)
    assert told[1] == b""


@pytest.mark.guarantee("D6")
def test_a_swap_without_a_number_names_the_leaders_that_it_waits_for() -> None:
    """The status store has no reports of it: a leader that has swapped, and a rank that leads nobody, have come."""
    wires: dict[int, Wire] = {}
    far_ends: list[socket.socket] = []
    for host, rank in ((1, 5), (2, 6)):
        with socket.create_server(("127.0.0.1", 0)) as server:
            wires[host] = Wire(rank, socket.create_connection(server.getsockname()))
            far_ends.append(server.accept()[0])
    group = Group()
    own = Leaders(group.health, {0: 0, 1: 1, 2: 2}, 0, wires)
    other = Leaders(Group().health, {0: 0, 1: 1}, 1, {0: Wire(4, far_ends[0])})
    tensors = [torch.zeros(1, dtype=torch.uint8) for _ in range(4)]
    operation, end = Operation("device", "measure the line", 0), time.monotonic() + 0.3
    other.swap(Call(operation, end), {0: tensors[0]}, {})
    call = Call(operation, end)
    swap = own.swap(call, {1: tensors[1], 2: tensors[1]}, {1: tensors[2], 2: tensors[3]})
    with pytest.raises(CommTimeoutError) as caught:
        own.wait(call, swap)
    assert caught.value.missing == (6,)
    own.close()
    other.close()
    far_ends[1].close()
