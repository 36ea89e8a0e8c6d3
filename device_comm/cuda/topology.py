"""The devices of a group and the links between them, queried from the driver and exchanged between all ranks.

`probe` does not raise: a query that fails is recorded as a problem with its reason. `GroupTopology` is a pure function
of the exchanged facts, so it is equal on all ranks.

Between two devices that this process sees, the driver's CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED says whether
atomics work over the link. They do over NVLink, and they do not over PCIe between GPUs. CUDA tells nothing of a device
that CUDA_VISIBLE_DEVICES hides, so NVML is asked for these. A link counts as unknown if neither says anything
of it, or if it leads to a hidden device to which NVML does not affirm access: CUDA may map the memory
nevertheless, which a test shows.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from device_comm.cpu.shared_memory import host_id
from device_comm.cuda.custom.peer_messages import PeerExchange
from device_comm.cuda.driver import Driver
from shm_broadcast.errors import CommError

__all__ = ["DeviceFacts", "GroupTopology", "Link", "gather_topology", "probe"]

logger: logging.Logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_TEXT: Final = 500
_HIDDEN: Final = "links to hidden devices"
_Text = Annotated[str, msgspec.Meta(max_length=_TEXT)]
_Name = Annotated[str, msgspec.Meta(max_length=256)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]

LinkKind = Literal["same device", "nvlink", "pcie", "none", "unknown"]


class Link(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The link from one device to another.

    Attributes:
        access: Whether the driver reports that the device can access the other's memory.
        native_atomics: Whether atomics work over the link, which is NVLink then.
    """

    access: bool
    native_atomics: bool


class DeviceFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's device, as reported by its driver. An unknown fact has its default value and an entry in `problems`.

    Attributes:
        name: Name of the model.
        arch: "sm_90"; empty if unknown.
        multiprocessors: Number of multiprocessors.
        memory_bytes: Size of its memory in bytes.
        uuid: UUID of the device, or of the MIG instance.
        pci_bus_id: Its PCI bus id.
        host_id: Host id; see `cpu.shared_memory.host_id`.
        driver_version: 13000 is CUDA 13.0.
        ipc: Whether other processes can map its memory by CUDA IPC.
        vmm: Whether other processes can map its memory by descriptors.
        multicast: Whether it can be of the team of a multicast object.
        links: Links to every device of the host that CUDA shows to this process, and to those to which NVML affirms
            access, by UUID.
        problems: Why a fact is missing, by the fact's name.
    """

    name: _Name = ""
    arch: Annotated[str, msgspec.Meta(pattern=r"^(sm_[0-9]{2,3})?$")] = ""
    multiprocessors: _Count = 0
    memory_bytes: _Count = 0
    uuid: Annotated[str, msgspec.Meta(max_length=64)] = ""
    pci_bus_id: Annotated[str, msgspec.Meta(max_length=64)] = ""
    host_id: Annotated[str, msgspec.Meta(max_length=128)] = ""
    driver_version: _Count = 0
    ipc: bool = False
    vmm: bool = False
    multicast: bool = False
    links: Annotated[dict[_Name, Link], msgspec.Meta(max_length=1024)] = {}
    problems: Annotated[dict[_Name, _Text], msgspec.Meta(max_length=64)] = {}


def probe(driver: Driver) -> DeviceFacts:
    """Return the facts that `driver` reports about its device. Does not raise: a failed query becomes a problem."""
    problems: dict[str, str] = {}

    def ask(name: str, question: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return question()
        except (CommError, OSError) as error:
            problems[name] = f"{type(error).__name__}: {error}"[:_TEXT]
            return otherwise

    major, minor = ask("arch", driver.compute_capability, (0, 0))
    return DeviceFacts(
        name=ask("name", driver.device_name, ""),
        arch=f"sm_{major}{minor}" if major else "",
        multiprocessors=ask("multiprocessors", driver.multiprocessors, 0),
        memory_bytes=ask("memory_bytes", driver.total_memory, 0),
        uuid=ask("uuid", driver.uuid, ""),
        pci_bus_id=ask("pci_bus_id", driver.pci_bus_id, ""),
        host_id=ask("host_id", host_id, ""),
        driver_version=ask("driver_version", driver.driver_version, 0),
        ipc=ask("ipc", driver.ipc_supported, False),
        vmm=ask("vmm", driver.vmm_supported, False),
        multicast=ask("multicast", driver.multicast_supported, False),
        links=_links(driver, ask),
        problems=problems,
    )


def _links(driver: Driver, ask: Callable[..., object]) -> dict[str, Link]:
    uuids = ask("links", driver.device_uuids, [])
    links: dict[str, Link] = {}
    for index, uuid in enumerate(uuids if isinstance(uuids, list) else []):
        access = ask(f"access to {uuid}", lambda index=index: driver.can_access_peer(index), None)
        atomics = ask(f"atomics on {uuid}", lambda index=index: driver.native_atomics(index), False)
        if isinstance(access, bool):
            links[uuid] = Link(access, bool(atomics))
    hidden = ask(_HIDDEN, driver.all_links, {})
    for uuid, (access, is_nvlink) in (hidden if isinstance(hidden, dict) else {}).items():
        if access:
            links.setdefault(uuid, Link(access, is_nvlink))
    return links


class GroupTopology(msgspec.Struct, frozen=True):
    """The devices of all ranks and the facts derived from them; equal on every rank.

    Attributes:
        ranks: Global ranks.
        devices: Each rank's device, by rank in the group.
    """

    ranks: tuple[int, ...]
    devices: tuple[DeviceFacts, ...]

    @property
    def arch(self) -> str:
        """Return the architecture, such as "sm_90"; empty if the devices differ or one is unknown."""
        return self._shared([device.arch for device in self.devices])

    @property
    def device_name(self) -> str:
        """Return the name of the model; empty if the devices differ."""
        return self._shared([device.name for device in self.devices])

    @property
    def multiprocessors(self) -> int:
        """Return the smallest number of multiprocessors of any device; 0 if one is unknown."""
        return min(device.multiprocessors for device in self.devices)

    @property
    def has_nvlink(self) -> bool:
        """Return whether NVLink connects every pair of different devices; an unknown link counts as not NVLink.

        True if there is only one device: its memory is as fast.
        """
        return {self.link(one, other) for one, other in self._pairs()} <= {"nvlink", "same device"}

    @property
    def has_multicast(self) -> bool:
        """Return whether the devices can be the team of a multicast object: different ones, on NVLink, all able to."""
        are_different = len({device.uuid for device in self.devices if device.uuid}) == len(self.devices)
        are_able = all(device.multicast and device.vmm for device in self.devices)
        return are_able and are_different and self.has_nvlink

    def link(self, one: int, other: int) -> LinkKind:
        """Return how rank `one` in the group reaches the memory of rank `other`."""
        here, there = self.devices[one], self.devices[other]
        if not here.host_id or here.host_id != there.host_id:
            return "none" if here.host_id and there.host_id else "unknown"
        if here.uuid and here.uuid == there.uuid:
            return "same device"
        found = here.links.get(there.uuid) if there.uuid else None
        if found is None:
            return "unknown"
        if not found.access:
            return "none"
        return "nvlink" if found.native_atomics else "pcie"

    def why_not_peers(self) -> str:
        """Return why the ranks cannot use each other's memory, or "" if it may work.

        An unknown link may work: CUDA IPC also maps memory of devices that are hidden from this process, and peer
        writes are tested before they are used.
        """
        if not self._shared([device.host_id for device in self.devices]):
            return "the ranks are on several hosts, or it is unknown on which"
        if not self.arch:
            named = ", ".join(
                f"rank {rank}: {device.arch or device.problems.get('arch', 'unknown')}"
                for rank, device in zip(self.ranks, self.devices, strict=True)
            )
            return f"the devices are not all of one known architecture ({named})"
        for one, other in self._pairs():
            if self.link(one, other) == "none":
                return (
                    f"the driver says that the device of rank {self.ranks[one]} ({self.devices[one].pci_bus_id}) "
                    f"cannot access that of rank {self.ranks[other]} ({self.devices[other].pci_bus_id})"
                )
        return ""

    def _pairs(self) -> list[tuple[int, int]]:
        return list(itertools.permutations(range(len(self.devices)), 2))

    @staticmethod
    def _shared(values: Sequence[str]) -> str:
        return values[0] if len(set(values)) == 1 else ""


def gather_topology(facts: DeviceFacts, peers: PeerExchange) -> GroupTopology:
    """Exchange the facts of all ranks. *Collective*; blocks as long as the exchange does.

    Logs, once per process, why links from this rank's device to others of the group are unknown.

    Raises:
        DecodeError: A rank sent a malformed message; raised on every rank.
        Others: As the exchange.
    """
    found = GroupTopology(peers.ranks, tuple(peers.gather(facts)))
    reason = facts.problems.get(_HIDDEN, "")
    if reason and "unknown" in {found.link(peers.rank, other) for other in range(len(peers.ranks))}:
        _warn_once(reason)
    return found


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning(
        "the links to devices that CUDA_VISIBLE_DEVICES hides from this process are unknown, so they count as PCIe, "
        "over which NCCL carries most calls: %s",
        reason,
    )
