"""Names become addresses, and an address of this host is chosen by the route or by the interface."""

import logging
import socket
import threading
import time
from pathlib import Path

import pytest

from coordinator.addresses import interfaces, names
from coordinator.addresses.interfaces import interface_address, routed_address
from coordinator.addresses.names import (
    Address,
    addresses_of,
    await_addresses,
    is_loopback,
    is_numeric,
    refuse_loopback,
)
from coordinator.bootstrap import serving
from shm_broadcast.errors import CapabilityError, ClosedError, SettingsError, UsageError

HERE = Address(socket.AF_INET, ("127.0.0.1", 1))
# An interface with this number does not exist, so no route does.
NOWHERE = Address(socket.AF_INET6, ("fe80::1", 1, 0, 1 << 30))
# Of TEST-NET-1, which no host has.
ELSEWHERE = Address(socket.AF_INET, ("192.0.2.1", 0))


def test_a_number_is_its_own_address() -> None:
    """Both families, without a question to anybody."""
    assert addresses_of("10.0.0.1", 7) == [Address(socket.AF_INET, ("10.0.0.1", 7))]
    (six,) = addresses_of("fd00::1", 7)
    assert (six.family, six.text, six.target[1]) == (socket.AF_INET6, "fd00::1", 7)


@pytest.mark.parametrize("host", ["a" * 64, "a..b"])
def test_what_can_never_be_a_name_is_refused(host: str) -> None:
    """Nobody waits for it."""
    with pytest.raises(UsageError, match="no name of a host"):
        await_addresses(host, 1, 60.0, 0, threading.Event())


def appearing(monkeypatch: pytest.MonkeyPatch, after: int) -> list[str]:
    """Let names have no address the first `after` times that one is looked up; return the list of what was."""
    asked: list[str] = []

    def found(host: str, port: int) -> list[Address]:
        asked.append(host)
        if len(asked) <= after:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [HERE]

    monkeypatch.setattr(names, "addresses_of", found)
    return asked


@pytest.mark.guarantee("G63")
def test_a_name_is_asked_for_again_until_it_has_an_address(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says once that it has none, with the rank and the call."""
    asked = appearing(monkeypatch, 3)
    with caplog.at_level(logging.WARNING):
        assert await_addresses("late", 1, 60.0, 5, threading.Event()) == [HERE]
    assert asked == ["late"] * 4
    (record,) = caplog.records
    assert "the name late has no address yet (Name or service not known)" in record.getMessage()
    assert (record.__dict__["comm_rank"], record.__dict__["comm_call"]) == (5, "init_distributed_environment")


def test_at_the_deadline_the_resolvers_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was asked more than once."""
    asked = appearing(monkeypatch, 1000)
    start = time.monotonic()
    with pytest.raises(socket.gaierror):
        await_addresses("never", 1, 0.2, 0, threading.Event())
    assert time.monotonic() - start >= 0.2
    assert len(asked) >= 2


def test_who_waits_no_more_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C nothing may begin to listen later."""
    over = threading.Event()
    asked = appearing(monkeypatch, 1000)
    threading.Timer(0.1, over.set).start()
    with pytest.raises(ClosedError, match="nobody waits any more"):
        await_addresses("never", 1, 600.0, 0, over)
    assert asked


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("127.0.1.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.1", False),
        ("fe80::1%lo", False),
        ("::ffff:10.0.0.1", False),
    ],
)
def test_loopback_is_told_from_other_addresses(address: str, expected: bool) -> None:
    """Those of IPv6 too, also of IPv4 in IPv6."""
    assert is_loopback(address) is expected
    assert is_numeric(address)


@pytest.mark.parametrize("host", ["localhost", "n1", "10.0.0", "1", "fd00"])
def test_a_name_is_no_address(host: str) -> None:
    """Short forms of addresses, which the resolver may know, count as names."""
    assert not is_numeric(host)


def test_the_error_for_loopback_says_what_to_change() -> None:
    """A name is changed in /etc/hosts, an address where it was passed."""
    assert "/etc/hosts" in str(refuse_loopback("alpha", "127.0.1.1"))
    assert "/etc/hosts" not in str(refuse_loopback("127.0.0.1", "127.0.0.1"))


def test_the_first_address_with_a_route_counts() -> None:
    """A host may have an address of a family that this one does not use."""
    assert routed_address("h", [NOWHERE, HERE]) == "127.0.0.1"
    with pytest.raises(CapabilityError, match=r"no route to h .fe80::1: "):
        routed_address("h", [NOWHERE])


def test_rank_0_listens_on_the_first_address_that_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a name with several addresses some may not be of this host. If none is, each reason is told once."""
    own = Address(socket.AF_INET, ("127.0.0.1", 0))
    monkeypatch.setattr(serving, "addresses_of", lambda host, port: [ELSEWHERE, own])
    with serving.listen("h", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    monkeypatch.setattr(serving, "addresses_of", lambda host, port: [ELSEWHERE, ELSEWHERE])
    with pytest.raises(UsageError, match="on h:7 .Cannot assign requested address.: the address must"):
        serving.listen("h", 7)


TABLE = """\
00000000000000000000000000000001 01 80 10 80       lo
fe800000000000000000000000000001 02 40 20 80   gctest
fd000000000000000000000000000007 02 40 00 40   gctest
fd000000000000000000000000000008 02 40 00 20   gctest
fd000000000000000000000000000009 02 40 00 80   gctest
"""


def test_an_interface_has_an_address_of_either_family(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither link-local ones nor those on which nobody can listen yet or any more."""
    (tmp_path / "if_inet6").write_text(TABLE)
    monkeypatch.setattr(interfaces, "_IPV6_ADDRESSES", tmp_path / "if_inet6")
    assert interface_address("gctest") == "fd00::9"
    assert interface_address("lo") == "127.0.0.1"
    assert interface_address("lo", prefers_ipv6=True) == "::1"
    monkeypatch.setattr(interfaces, "_IPV6_ADDRESSES", tmp_path / "no kernel with IPv6")
    assert interface_address("lo", prefers_ipv6=True) == "127.0.0.1"
    with pytest.raises(SettingsError, match="interface = 'gctest'.* this host has .*lo"):
        interface_address("gctest")
