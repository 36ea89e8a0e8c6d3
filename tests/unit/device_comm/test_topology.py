"""A group's devices: probed without raising, sent to all ranks, and evaluated by pure functions."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from device_comm.cuda.custom.peer_messages import PeerExchange
from device_comm.cuda.driver_bindings import bindings
from device_comm.cuda.topology import DeviceFacts, GroupTopology, Link, _warn_once, gather_topology, probe
from shm_broadcast.errors import DecodeError
from tests.fake_cuda import FakeDevice, FakeDriver, FakeFaults, fake_devices

MESSAGE = msgspec.msgpack.encode(DeviceFacts(name="x"))


def facts_of(directory: Path, ranks: int = 2, **faults: Any) -> list[DeviceFacts]:
    """Return the facts of ranks that see each other's devices; `faults` are those of rank 1."""
    drivers = [
        FakeDriver(
            directory, rank, devices=fake_devices(ranks), faults=FakeFaults(**(faults if rank == 1 else {}))
        )
        for rank in range(ranks)
    ]
    return [probe(driver) for driver in drivers]


def group(devices: Sequence[DeviceFacts]) -> GroupTopology:
    """Return the topology of ranks 10, 11, ..."""
    return GroupTopology(tuple(range(10, 10 + len(devices))), tuple(devices))


def test_facts_are_what_the_driver_says(tmp_path: Path) -> None:
    """The facts hold every field, and a link to every device that the process sees."""
    one, other = facts_of(tmp_path)
    assert (one.arch, one.name, one.multiprocessors) == ("sm_90", "Fake H100", 132)
    assert (one.driver_version, one.ipc, one.vmm, one.problems) == (13000, True, True, {})
    assert one.links == {one.uuid: Link(True, True), other.uuid: Link(True, True)}
    assert one.pci_bus_id != other.pci_bus_id
    topology = group([one, other])
    assert (topology.arch, topology.multiprocessors, topology.has_nvlink) == ("sm_90", 132, True)
    assert topology.why_not_peers() == ""


def test_links_to_devices_that_a_process_does_not_see_come_from_nvml(tmp_path: Path) -> None:
    """Engines give each worker one device: our kernels are chosen by links that CUDA cannot tell then."""
    devices = fake_devices(3)
    uuids = [device.uuid for device in devices]

    def alone(index: int, is_nvlink: bool) -> DeviceFacts:
        hidden = {uuid: (True, is_nvlink) for uuid in uuids if uuid != uuids[index]}
        faults = FakeFaults(hidden=hidden)
        return probe(FakeDriver(tmp_path, index, devices=[devices[index]], device_index=0, faults=faults))

    fast = group([alone(index, is_nvlink=True) for index in range(3)])
    assert fast.has_nvlink
    slow = group([alone(index, is_nvlink=False) for index in range(3)])
    assert slow.link(0, 2) == "pcie"
    assert not slow.has_nvlink
    # What CUDA sees itself counts.
    seen = probe(
        FakeDriver(
            tmp_path, 0, devices=devices, faults=FakeFaults(no_nvlink=True, hidden={uuids[1]: (True, True)})
        )
    )
    assert seen.links[uuids[1]] == Link(access=True, native_atomics=False)


def alone_of(directory: Path, devices: list[FakeDevice], index: int, **faults: Any) -> DeviceFacts:
    """Return the facts of a rank that sees its own device only."""
    driver = FakeDriver(
        directory, index, devices=[devices[index]], device_index=0, faults=FakeFaults(**faults)
    )
    return probe(driver)


def test_a_hidden_link_that_nvml_does_not_affirm_is_tried(tmp_path: Path) -> None:
    """CUDA may map the memory nevertheless, which the test of writes shows: only CUDA's own answer forbids trying."""
    devices = fake_devices(2)
    other = devices[1].uuid
    one = alone_of(tmp_path, devices, 0, hidden={other: (False, False)})
    assert other not in one.links
    found = group([one, alone_of(tmp_path, devices, 1, hidden={devices[0].uuid: (True, True)})])
    assert (found.link(0, 1), found.link(1, 0)) == ("unknown", "nvlink")
    assert found.why_not_peers() == ""
    assert not found.has_nvlink


def test_bindings_without_nvml_on_one_rank_decide_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older cuda-bindings have no NVML. The rank records why, and every rank treats the links as PCIe."""
    devices = fake_devices(2)
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvml", None)
    monkeypatch.setattr(FakeDriver, "all_links", lambda _driver: bindings("nvml"))
    old = alone_of(tmp_path, devices, 1)
    monkeypatch.undo()
    new = alone_of(tmp_path, devices, 0, hidden={devices[1].uuid: (True, True)})
    assert "update it, for example to 12.9.10 or 13.4.4" in old.problems["links to hidden devices"]
    found = group([new, old])
    assert (found.link(0, 1), found.link(1, 0)) == ("nvlink", "unknown")
    assert not found.has_nvlink
    assert found.why_not_peers() == ""


def _answers(encoded: list[bytes], own: bytes) -> list[bytes]:
    """Return the messages of all ranks, of which the first is `own`."""
    assert own == encoded[0]
    return encoded


def test_links_that_remain_unknown_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Large groups go through NCCL then. Where CUDA sees all devices there is nothing to say."""
    _warn_once.cache_clear()
    devices = fake_devices(2)
    fails = {"all_links": (1, 999)}
    blind = [alone_of(tmp_path, devices, index, fail=fails) for index in (0, 1)]
    seeing = [
        probe(FakeDriver(tmp_path, rank, devices=devices, faults=FakeFaults(fail=fails))) for rank in (0, 1)
    ]
    with caplog.at_level("WARNING"):
        for facts in (seeing, blind, blind):
            encoded = [msgspec.msgpack.encode(each) for each in facts]
            gather_topology(facts[0], PeerExchange(partial(_answers, encoded), 0, [4, 7]))
            assert len(caplog.records) == (0 if facts is seeing else 1)
    assert "999" in caplog.text
    assert "count as PCIe" in caplog.text


@pytest.mark.parametrize(
    "method",
    [
        "compute_capability",
        "device_name",
        "multiprocessors",
        "total_memory",
        "uuid",
        "pci_bus_id",
        "driver_version",
        "ipc_supported",
        "vmm_supported",
        "multicast_supported",
        "device_uuids",
        "all_links",
        "can_access_peer",
        "native_atomics",
    ],
)
def test_a_probe_that_fails_is_a_fact_with_a_reason(tmp_path: Path, method: str) -> None:
    """A failed probe raises nothing; its reason is kept, and the other facts remain."""
    _, broken = facts_of(tmp_path, fail={method: (1, 999)})
    (reason,) = broken.problems.values()
    assert "CudaError" in reason
    assert "999" in reason
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(broken), type=DeviceFacts) == broken


def test_links_are_told_apart(tmp_path: Path) -> None:
    """Links are same device, NVLink, PCIe, none or unknown; only a link known to fail forbids trying."""
    one, other = facts_of(tmp_path)
    assert group([one, other]).link(0, 1) == "nvlink"
    assert group([one, one]).link(0, 1) == "same device"
    assert group([one, one]).has_nvlink, "one device has no slower link"
    _, pcie = facts_of(tmp_path, no_nvlink=True)
    assert group([one, pcie]).link(1, 0) == "pcie"
    assert not group([one, pcie]).has_nvlink
    hidden = msgspec.structs.replace(one, links={one.uuid: Link(True, True)})
    assert group([hidden, other]).link(0, 1) == "unknown"
    assert not group([hidden, other]).has_nvlink
    assert group([hidden, other]).why_not_peers() == ""
    _, blocked = facts_of(tmp_path, blocked=[0])
    assert group([one, blocked]).link(1, 0) == "none"
    assert "rank 11 (0000:02:00.0) cannot access that of rank 10" in group([one, blocked]).why_not_peers()


def test_multicast_needs_different_devices_on_nvlink_that_all_have_it(tmp_path: Path) -> None:
    """A device is once in a team. What one device lacks, or its driver does not tell, no rank uses."""
    one, other = facts_of(tmp_path)
    assert group([one, other]).has_multicast
    assert not group([one, one]).has_multicast
    for lack in (
        {"multicast": False},
        {"vmm": False},
        {"no_nvlink": True},
        {"fail": {"multicast_supported": (1, 1)}},
        {"fail": {"uuid": (1, 1)}},
    ):
        _, without = facts_of(tmp_path, **lack)
        assert not group([one, without]).has_multicast, lack
        assert not group([without, one]).has_multicast, lack


def test_what_speaks_against_peers_has_a_reason(tmp_path: Path) -> None:
    """Several hosts, and different or unknown architectures, are reasons against peer access."""
    one, other = facts_of(tmp_path)
    elsewhere = msgspec.structs.replace(other, host_id="elsewhere")
    assert group([one, elsewhere]).link(0, 1) == "none"
    assert "several hosts" in group([one, elsewhere]).why_not_peers()
    older = msgspec.structs.replace(other, arch="sm_80", multiprocessors=108)
    assert "rank 11: sm_80" in group([one, older]).why_not_peers()
    assert group([one, older]).multiprocessors == 108
    _, broken = facts_of(tmp_path, fail={"compute_capability": (1, 3)})
    assert "rank 11: CudaError" in group([one, broken]).why_not_peers()
    nowhere = msgspec.structs.replace(other, host_id="")
    assert "several hosts" in group([nowhere, nowhere]).why_not_peers()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04\x95gadget",
        MESSAGE[:-1],
        MESSAGE + b"\0",
        b"\x91" * 5000,
        b"x" * (9 << 20),
        msgspec.msgpack.encode({"arch": "sm_90; rm"}),
        msgspec.msgpack.encode({"multiprocessors": -1}),
        msgspec.msgpack.encode({"links": {"a": [True]}}),
        msgspec.msgpack.encode({"unknown": 1}),
        msgspec.msgpack.encode({"name": "x" * 300}),
        msgspec.msgpack.encode({"name": b"\xff"}),
    ],
)
def test_nonsense_is_refused(data: bytes) -> None:
    """Whatever a rank sends, the others get facts within bounds or a `DecodeError` that names it."""
    with pytest.raises(DecodeError, match="rank 7"):
        gather_topology(DeviceFacts(), PeerExchange(lambda own: [own, data], 0, [4, 7]))


def test_all_ranks_get_the_same(tmp_path: Path) -> None:
    """All ranks derive the same topology from the same facts, which survive encoding."""
    told = facts_of(tmp_path, no_nvlink=True)
    encoded = [msgspec.msgpack.encode(facts) for facts in told]
    peers = PeerExchange(lambda _own: encoded, 0, [4, 7])
    one, other = (gather_topology(facts, peers) for facts in told)
    assert one == other == GroupTopology((4, 7), tuple(told))
