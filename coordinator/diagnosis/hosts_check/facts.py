"""What this rank finds out about its own host, and about its way to the store, before it meets anybody."""

from __future__ import annotations

import ipaddress
import os
import platform
import resource
import socket
import threading
from concurrent.futures import Future
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import msgspec
import torch

from coordinator.addresses.interfaces import interface_address, routed_address
from coordinator.addresses.names import Address, addresses_of, is_loopback, refuse_loopback
from coordinator.bootstrap.serving import allow_descriptors, descriptors_needed
from coordinator.diagnosis.hosts_check.interfaces import carrier_of, list_interfaces
from coordinator.diagnosis.hosts_check.launched import Launched
from coordinator.diagnosis.hosts_check.narration import Narrator, stop
from coordinator.diagnosis.hosts_check.reaching import keep_connecting
from coordinator.diagnosis.hosts_check.records import Interface, LinkFailure, RankFacts
from coordinator.settings import CoordinatorSettings
from shm_broadcast.errors import CapabilityError, SettingsError, UsageError
from shm_broadcast.liveness import this_process

__all__ = ["Chosen", "choose_address", "collect_facts"]

_SHM: Final = "/dev/shm"  # noqa: S108 - only asked for its size
_SHOWN_INTERFACES: Final = 16


class Chosen(msgspec.Struct, frozen=True):
    """The address at which the others would reach this rank.

    Attributes:
        address: Numeric.
        interface: That has it; None for loopback.
        why: Why it is used.
    """

    address: str
    interface: Interface | None
    why: str


def collect_facts(
    launched: Launched, settings: CoordinatorSettings, timeout_s: float, narrator: Narrator
) -> RankFacts:
    """Find out what this host is like and whether it reaches the store; say so, step by step.

    Raises:
        Stopped: The store's host has no address, none that other hosts reach, or does not answer.
    """
    process = this_process()
    narrator.say(f"host {process.hostname}, boot id {process.boot_id[:8]}")
    narrator.say(_room(launched))
    interfaces = list_interfaces()
    _show(interfaces, narrator)
    addresses = _resolve(launched, timeout_s)
    found = ", ".join(dict.fromkeys(each.text for each in addresses))
    if launched.host != found:
        narrator.say(f"the store's name {launched.host} stands for {found}")
    chosen = choose_address(launched, settings, addresses, interfaces)
    carrier = "loopback" if chosen.interface is None else chosen.interface.name
    alone = "; only ranks on this host can" if is_loopback(chosen.address) else ""
    narrator.say(f"others would reach this rank at {chosen.address} on {carrier}, {chosen.why}{alone}")
    _compare_route(launched, addresses, chosen, narrator)
    open_files = _check_descriptors(launched)
    connect_ms = None if launched.serves else _reach(launched, addresses, chosen, timeout_s, narrator)
    return RankFacts(
        rank=launched.rank,
        hostname=process.hostname,
        pid=process.pid,
        boot_id=process.boot_id,
        network_namespace=process.network_namespace,
        host_id=settings.host_id or "",
        address=chosen.address,
        interface="lo" if chosen.interface is None else chosen.interface.name,
        why=chosen.why,
        interfaces=interfaces[:_SHOWN_INTERFACES],
        master_addresses=tuple(dict.fromkeys(each.text for each in addresses)),
        connect_ms=connect_ms,
        open_files=open_files,
        shm_bytes=_shm_bytes(),
        remote_ports=settings.remote_ports or "",
        versions={
            "group-coordinator": _version(),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        settings=settings.fingerprint(),
    )


def _version() -> str:
    try:
        return version("group-coordinator")
    except PackageNotFoundError:
        return "not installed"


def _room(launched: Launched) -> str:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = "any number of" if hard == resource.RLIM_INFINITY else str(hard)
    needs = f", {descriptors_needed(launched.world_size)} needed for the store" if launched.serves else ""
    return f"descriptors: {limit} allowed{needs}; {_SHM}: {_shm_bytes() >> 20} MiB, for NCCL only"


def _show(interfaces: tuple[Interface, ...], narrator: Narrator) -> None:
    """Say which interfaces there are. Containers' ends of cables have link-local addresses alone, and are counted."""
    shown = 0
    for interface in interfaces:
        addresses = [each for each in interface.addresses if not ipaddress.ip_interface(each).is_link_local]
        if addresses and shown < _SHOWN_INTERFACES:
            shown += 1
            narrator.say(f"interface {interface.name}: {', '.join(addresses)}; MTU {interface.mtu}")
    if shown < len(interfaces):
        narrator.say(f"interfaces without an address of a network: {len(interfaces) - shown}")
    if not interfaces:
        narrator.say("no interface beside loopback is up")


def _shm_bytes() -> int:
    try:
        found = os.statvfs(_SHM)
    except OSError:
        return 0
    return found.f_frsize * found.f_blocks


def _resolve(launched: Launched, timeout_s: float) -> list[Address]:
    """Return the addresses of the store's host, asked on a thread: the name service may take long, or for ever."""
    outcome: Future[list[Address]] = Future()

    def ask() -> None:
        try:
            outcome.set_result(addresses_of(launched.host, launched.port))
        except (OSError, UsageError) as error:
            outcome.set_exception(error)

    threading.Thread(target=ask, name="hosts-check-name", daemon=True).start()
    try:
        return outcome.result(timeout_s)
    except TimeoutError:
        raise stop(
            f"the name service has not said within {timeout_s:g} s what {launched.host} stands for",
            f"the servers in /etc/resolv.conf, with `getent ahosts {launched.host}`; or use an address",
        ) from None
    except OSError as error:
        raise stop(
            f"the name of the store's host, {launched.host}, has no address here: {error.strerror}",
            f"the spelling, /etc/hosts and DNS, with `getent ahosts {launched.host}`; in Kubernetes a pod's name "
            "needs a "
            "headless service and the pod itself; or use an address",
        ) from None
    except UsageError as error:
        raise stop(str(error), f"the name that {launched.launcher} gives as the store's host") from None


def choose_address(
    launched: Launched,
    settings: CoordinatorSettings,
    addresses: list[Address],
    interfaces: tuple[Interface, ...],
) -> Chosen:
    """Return the address that groups would use, by the rules of `coordinator.bootstrap.membership.own_address`.

    Raises:
        Stopped: There is none.
    """
    first = addresses[0]
    if is_loopback(first.text) and launched.spans_hosts:
        raise stop(
            str(refuse_loopback(launched.host, first.text)),
            f"`getent ahosts {launched.host}` on this host, and /etc/hosts",
        )
    try:
        if settings.interface is not None:
            address = interface_address(settings.interface, first.family == socket.AF_INET6)
            why = f"because GROUP_COORDINATOR_INTERFACE={settings.interface} says so"
        else:
            address = routed_address(launched.host, addresses)
            why = f"because the route to the store ({first.text}) begins there"
    except SettingsError as error:
        raise stop(str(error), "GROUP_COORDINATOR_INTERFACE on this host, with `ip address`") from None
    except CapabilityError as error:
        raise stop(
            str(error),
            f"`ip route get {first.text}` and `ip address`: is the interface of that network up, and has it an "
            "address?",
        ) from None
    if launched.serves and address == first.text and settings.interface is None:
        why = "because the store is to be served there"
    return Chosen(address, carrier_of(address, interfaces), why)


def _compare_route(launched: Launched, addresses: list[Address], chosen: Chosen, narrator: Narrator) -> None:
    """Say from which address the kernel itself would go to the store, if that is another one."""
    try:
        own = routed_address(launched.host, addresses)
    except CapabilityError as error:
        narrator.say(f"warning: {error}")
        return
    if own != chosen.address:
        narrator.say(f"the kernel itself would go to the store from {own}")


def _check_descriptors(launched: Launched) -> int:
    """Return how many descriptors this process may open; `coordinator.bootstrap.serving` says how many it needs.

    Raises:
        Stopped: Too few for what this rank serves.
    """
    if launched.serves:
        try:
            allow_descriptors(launched.world_size)
        except UsageError as error:
            raise stop(str(error), "`ulimit -Hn` where the launcher starts this rank") from None
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return hard


def _reach(
    launched: Launched, addresses: list[Address], chosen: Chosen, timeout_s: float, narrator: Narrator
) -> float:
    where = f"{launched.host} port {launched.port}"
    narrator.say(f"connecting to the store at {where}, for at most {timeout_s:g} s ...")
    reached = keep_connecting(addresses, timeout_s)
    if not isinstance(reached, LinkFailure):
        narrator.say(f"the store answers after {reached:.2f} ms")
        return reached
    raise stop(reached.text, _advice(reached, launched, addresses, chosen))


def _advice(failure: LinkFailure, launched: Launched, addresses: list[Address], chosen: Chosen) -> str:
    """Return what to look at where the store cannot be reached."""
    server = "the launcher's agent on the first host" if launched.has_agent else "rank 0"
    address, port = addresses[0].text, launched.port
    if is_loopback(address):
        return (
            f"{launched.host} is this host itself ({address}): if rank 0 is on another host, /etc/hosts or the "
            "launcher's "
            "options must give the master's address in the network"
        )
    if failure.kind == "refused":
        listens = (
            f"; rank 0 listens at what {launched.host} stands for on its own host (`getent ahosts {launched.host}`)"
            if launched.host != address
            else ""
        )
        return (
            f"whether {server} is running ({_output_of(launched)}), on the host that has {address} and with port "
            f"{port} (`ss -ltn` there){listens}; a firewall may also refuse on its behalf"
        )
    if failure.kind == "no route":
        carrier = chosen.address if chosen.interface is None else chosen.interface.name
        return (
            f"the network between {carrier} and {address}: nobody there has that address, a router or firewall "
            "says no, "
            f"or that host is down; `ping {address}`, `ip neighbour` and `ip route get {address}`"
        )
    if failure.kind == "timed out":
        return (
            f"a firewall between {chosen.address} and {address} that drops packets to port {port}, or a wrong "
            "address; "
            f"does `ping {address}` answer, is port {port} let through on that host?"
        )
    return f"what listens at {address} port {port}: is it {server}?"


def _output_of(launched: Launched) -> str:
    return "its output may say why not" if launched.rank else "see the agent's output"
