"""What the ranks of a group know of each other once they have agreed.

A rank gets the views of the ranks on its own kernel, which it can watch and share memory with. Of the others it gets
where they are. With everything of everybody, 10,000 ranks would take 25 GB from the store that serves them.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from ipaddress import ip_address
from itertools import accumulate, pairwise
from typing import Final

import msgspec

from shm_broadcast.errors import CapabilityError
from shm_broadcast.liveness import PeerWatch, ProcessIdentity

__all__ = ["Place", "Places", "View", "Views", "read_view", "unable", "write_view"]

# Far more than the places of 100,000 ranks take: a store may be written by anybody who reaches it.
_MOST_BYTES: Final = 1 << 24
# Linux has no longer ones.
_LONGEST_NAME: Final = 64
_number: Final = re.compile(r"[0-9]+(?=[^0-9]*\Z)")


class View(msgspec.Struct, frozen=True):
    """What one rank tells the others when a group is created.

    Attributes:
        facts: Values that must be equal on all ranks, as text by name.
        process: Identity of the rank's process.
        address: Address at which the group's other ranks reach this rank; may differ.
        host_id: Host id; equal on ranks that can share memory.
        note: Further information for the ranks on the same kernel; may differ.
        digest: Of the facts, which the store does not hold with a view; filled in by `agree`, and so are the next two.
        nonce: Random text that makes this view unique.
        refusal: Why the rank cannot watch processes, or nothing.
    """

    facts: dict[str, str]
    process: ProcessIdentity
    address: str
    host_id: str = ""
    note: str = ""
    digest: str = ""
    nonce: str = ""
    refusal: str = ""


_Written = tuple[tuple[str, int, int, int, int, str], str, str, str, str, str, str]
_written_decoder: Final = msgspec.json.Decoder(_Written)


def write_view(view: View) -> str:
    """Return what the store holds of a view: all but the facts, without names, which would double what is received."""
    own = msgspec.structs.astuple(view.process)
    rest = view.address, view.host_id, view.note, view.digest, view.nonce, view.refusal
    return msgspec.json.encode((own, *rest)).decode()


def read_view(written: bytes) -> View:
    """Return the view of which `write_view` made this, without facts.

    Raises:
        msgspec.MsgspecError: It is something else.
    """
    process, *rest = _written_decoder.decode(written)
    return View({}, ProcessIdentity(*process), *rest)


def unable(views: Mapping[int, View]) -> int | None:
    """Return the first rank that would have to watch another one of `views` and cannot, or None."""
    for rank in sorted(rank for rank, view in views.items() if view.refusal):
        own = views[rank].process
        if any(
            (view.process.boot_id, view.process.pid_namespace) == (own.boot_id, own.pid_namespace)
            for other, view in views.items()
            if other != rank
        ):
            return rank
    return None


class Place(msgspec.Struct, frozen=True):
    """Where a rank is, by numbers of this agreement; equal ones mean the same thing on two ranks.

    Attributes:
        kernel: The kernel, that is the host with all of its containers.
        memory: Ranks that can share memory.
        loopback: Ranks for which 127.0.0.1 is the same.
        is_hidden: Whether the rank announced a loopback address.
    """

    kernel: int
    memory: int
    loopback: int
    is_hidden: bool


class _Columns(msgspec.Struct, array_like=True):
    """The places of all ranks. Each column holds differences to the rank before, which regular places make small.

    Likewise a host whose name is the `_successor` of the name before has None.
    """

    hostnames: list[str | None]
    kernels: list[int]
    memories: list[int]
    loopbacks: list[int]
    hidden: list[int]


class Places(Sequence[Place]):
    """Where all ranks are, in the order of the agreement."""

    def __init__(self, places: Sequence[Place], hostnames: Sequence[str]) -> None:
        """Use `hostnames`, one for each kernel in the order of their numbers."""
        self._places = places
        self.hostnames: Sequence[str] = hostnames

    @classmethod
    def of(cls, views: Iterable[View]) -> Places:
        """Return where the ranks with these views are."""
        kernels, memories, loopbacks, hostnames = _Numbers(), _Numbers(), _Numbers(), list[str]()
        places = []
        for view in views:
            process = view.process
            kernel = kernels[process.boot_id]
            if kernel == len(hostnames):
                hostnames.append(process.hostname)
            loopback = loopbacks[f"{process.boot_id} {process.network_namespace}"]
            places.append(Place(kernel, memories[view.host_id], loopback, _is_loopback(view.address)))
        return cls(places, hostnames)

    @classmethod
    def decode(cls, packed: bytes) -> Places:
        """Return what `encode` made.

        Raises:
            msgspec.MsgspecError: It is something else.
        """
        unpacker = zlib.decompressobj()
        try:
            content = unpacker.decompress(packed, _MOST_BYTES)
        except zlib.error as error:
            raise msgspec.DecodeError(f"the places of the ranks are damaged: {error}") from error
        columns = _columns_decoder.decode(content)
        kernels, memories, loopbacks, hidden = (
            list(accumulate(column))
            for column in (columns.kernels, columns.memories, columns.loopbacks, columns.hidden)
        )
        is_even = len(kernels) == len(memories) == len(loopbacks) == len(hidden)
        if not is_even or not all(0 <= kernel < len(columns.hostnames) for kernel in kernels):
            raise msgspec.ValidationError("the places of the ranks contradict each other")
        hostnames = list[str]()
        for name in columns.hostnames:
            full = name if name is not None or not hostnames else _successor(hostnames[-1])
            if full is None:
                raise msgspec.ValidationError("the name of a host follows no other one")
            hostnames.append(full)
        places = [
            Place(kernel, memory, loopback, bool(is_hidden))
            for kernel, memory, loopback, is_hidden in zip(kernels, memories, loopbacks, hidden, strict=True)
        ]
        return cls(places, hostnames)

    def encode(self) -> bytes:
        """Return the places, packed: less than 0.1 bytes a rank where ranks are placed and hosts numbered regularly."""
        columns = _Columns(
            [
                None if before is not None and name == _successor(before) else name
                for before, name in pairwise((None, *self.hostnames))
            ],
            _differences([place.kernel for place in self._places]),
            _differences([place.memory for place in self._places]),
            _differences([place.loopback for place in self._places]),
            _differences([int(place.is_hidden) for place in self._places]),
        )
        return zlib.compress(msgspec.json.encode(columns), 9)

    def __getitem__(self, index: int) -> Place:  # type: ignore[override]
        """Return where a rank is, by its position in the agreement."""
        return self._places[index]

    def __len__(self) -> int:
        """Return the number of ranks."""
        return len(self._places)


_columns_decoder: Final = msgspec.json.Decoder(_Columns)


class _Numbers(dict[str, int]):
    """Numbers of names, in the order in which they come."""

    def __missing__(self, name: str) -> int:
        self[name] = len(self)
        return self[name]


def _successor(name: str) -> str | None:
    """Return the name of the next host where hosts are numbered: `node-010.a` behind `node-009.a`; else None."""
    own, dot, domain = name.partition(".")
    number = _number.search(own) if len(name) <= _LONGEST_NAME else None
    if number is None:
        return None
    digits = number.group()
    following = f"{int(digits) + 1:0{len(digits)}}"
    return f"{own[: number.start()]}{following}{own[number.end() :]}{dot}{domain}"


def _differences(numbers: Sequence[int]) -> list[int]:
    return [second - first for first, second in pairwise((0, *numbers))]


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:  # no address at all, or one that names its interface
        return address.partition("%")[0] == "::1"


class Views:
    """What this rank knows of all ranks that have agreed.

    Attributes:
        rank: This process's global rank.
        near: The views of the ranks on this kernel, this one included, by global rank; their facts are left out.
    """

    def __init__(self, rank: int, ranks: Sequence[int], near: Mapping[int, View], places: Places) -> None:
        """Use `places` of all `ranks`, in the same order."""
        self.rank: int = rank
        self.near: dict[int, View] = dict(near)
        self._places = dict(zip(ranks, places, strict=True))
        self._hostnames = places.hostnames

    def of(self, ranks: Collection[int]) -> Views:
        """Return what is known of some of the ranks."""
        near = {rank: view for rank, view in self.near.items() if rank in ranks}
        chosen = [rank for rank in self._places if rank in ranks]
        return Views(
            self.rank, chosen, near, Places([self._places[rank] for rank in chosen], self._hostnames)
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return all ranks."""
        return tuple(self._places)

    @property
    def own(self) -> View:
        """Return this rank's view."""
        return self.near[self.rank]

    @property
    def host_ids(self) -> dict[int, str]:
        """Return a text for each rank, which is equal for ranks that can share memory."""
        return {rank: f"host {place.memory}" for rank, place in self._places.items()}

    @property
    def share_memory(self) -> bool:
        """Return whether all ranks can share memory."""
        return len({place.memory for place in self._places.values()}) == 1

    @property
    def processes(self) -> dict[int, ProcessIdentity]:
        """Return the processes on this kernel, by global rank."""
        return {rank: view.process for rank, view in self.near.items()}

    def watch(self) -> PeerWatch:
        """Return a watch over the other ranks, which the caller closes."""
        others = {rank: process for rank, process in self.processes.items() if rank != self.rank}
        hostnames = {
            rank: self._hostnames[place.kernel]
            for rank, place in self._places.items()
            if rank not in self.near
        }
        return PeerWatch(self.own.process, others, hostnames)

    @property
    def hosts(self) -> list[tuple[int, ...]]:
        """Return the ranks for which 127.0.0.1 is the same, ascending; such hosts on one kernel are far apart."""
        found: dict[int, list[int]] = {}
        places: dict[int, tuple[int, int]] = {}
        on_kernel = Counter[int]()
        for rank, place in sorted(self._places.items()):
            if place.loopback not in found:
                found[place.loopback] = []
                places[place.loopback] = (on_kernel[place.kernel], place.kernel)
                on_kernel[place.kernel] += 1
            found[place.loopback].append(rank)
        return [tuple(found[loopback]) for loopback in sorted(found, key=places.__getitem__)]

    @property
    def spans_hosts(self) -> bool:
        """Return whether the loopback address does not reach all ranks."""
        return len({place.loopback for place in self._places.values()}) > 1

    @property
    def neighbours(self) -> set[int]:
        """Return the ranks that the loopback address reaches: no network is between them and this one."""
        own = self._places[self.rank].loopback
        return {rank for rank, place in self._places.items() if place.loopback == own}

    def listening_address(self, loopback: str) -> str:
        """Return the address to listen on: `loopback` if it reaches all ranks, else the one this rank announced.

        What it depends on is equal on all ranks, so all ranks choose the same kind of address.

        Raises:
            CapabilityError: Ranks are on several hosts, and one of them announced a loopback address.
        """
        if not self.spans_hosts:
            return loopback
        for member, place in sorted(self._places.items()):
            if place.is_hidden:
                other = next(
                    rank for rank, each in sorted(self._places.items()) if each.loopback != place.loopback
                )
                raise CapabilityError(
                    f"rank {member} on host {self._hostname(member)} announced a loopback "
                    f"address{self._address(member)}, which rank {other} on host {self._hostname(other)}"
                    f"{self._address(other)} cannot reach; use the master's address on the network that connects the "
                    "hosts, not a name to which /etc/hosts there gives 127.0.1.1, or set GROUP_COORDINATOR_INTERFACE",
                    requirement="an address that the other hosts can reach",
                )
        return self.own.address

    def _address(self, rank: int) -> str:
        """Return the address that a rank announced in parentheses, if it is known here."""
        return f" ({self.near[rank].address})" if rank in self.near else ""

    def _hostname(self, rank: int) -> str:
        return self._hostnames[self._places[rank].kernel]
