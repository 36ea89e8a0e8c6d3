"""Test whether a rank's writes into a peer's memory arrive, and keep a good result until the next boot.

A driver may report peer access although writes get lost, because an IOMMU or access control services (ACS) on a PCIe
bridge redirect them. Therefore every rank writes into every region, and every rank reads its own region back.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from device_comm.cuda.custom.own_stream import own_stream
from device_comm.cuda.custom.peer_messages import PeerExchange
from device_comm.cuda.driver import Driver
from device_comm.cuda.whole_file import write_whole
from shm_broadcast.errors import CommError
from shm_broadcast.liveness import this_process

__all__ = ["PROBE_BYTES", "verify_peer_access"]

logger: logging.Logger = logging.getLogger(__name__)

_WORDS: Final = 64
_PARTS: Final = 4

PROBE_BYTES: Final = 4 * _WORDS * _PARTS
"""Bytes that each rank writes into each region: 1 KiB, in four runs of different words."""

# Bounds how much of a result's file is read; a result of eight ranks takes about 500 bytes.
_MOST_FILE_BYTES: Final = 64 << 10


class _Known(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The facts of one rank that a cached result depends on.

    Attributes:
        uuid: UUID of its device.
        driver_version: Version of its driver.
    """

    uuid: Annotated[str, msgspec.Meta(max_length=64)]
    driver_version: int


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a result's file, which is written only if everything works.

    Attributes:
        version: Version of this format.
        driver_version: Version of the driver during the test.
        boot_id: The kernel's boot id. The result depends on BIOS and kernel parameters, which change only at a boot.
        uuids: Devices in rank order.
        works: True.
    """

    version: Literal[1]
    driver_version: int
    boot_id: str
    uuids: tuple[str, ...]
    works: Literal[True]


def verify_peer_access(
    driver: Driver, peers: PeerExchange, addresses: Sequence[int], cache_directory: Path | None
) -> str:
    """Test whether each rank's writes into each region arrive; return why not, or "". Equal on all ranks.

    *Collective*. *Blocks* as long as the exchange does. *Capture*: not allowed. The first `PROBE_BYTES` * world size
    bytes of every region are overwritten and zero afterwards. A result from the cache touches no memory.

    The cache is used only if every rank finds the result in its own, so that ranks with different files do not
    diverge. Only good results are kept, so a repaired machine is tested again at once.

    Args:
        driver: This rank's device.
        peers: The ranks of the group.
        addresses: Addresses of every rank's region in this process, by rank in the group.
        cache_directory: Directory for results, created with mode 0700 if it does not exist. None keeps no results.

    Raises:
        DecodeError: A rank sent a malformed message; raised on every rank.
        Others: As the exchange.
    """
    devices = peers.gather(_Known(driver.uuid(), driver.driver_version()))
    record = _Record(
        1, devices[peers.rank].driver_version, this_process().boot_id, tuple(d.uuid for d in devices), True
    )
    path = None if cache_directory is None else _path(cache_directory, record)
    if not peers.failures("nothing is kept" if path is None else _why_unknown(path, record)):
        return ""
    try:
        failure = peers.failures(_write(driver, peers.rank, addresses))
        if not failure:
            failure = peers.failures(_look(driver, peers, addresses))
    finally:
        # No rank accesses the regions any more: all have reported their result, or the group is lost.
        cleared = _clear(driver, addresses[peers.rank], PROBE_BYTES * len(addresses))
    failure = failure or peers.failures(cleared)
    if failure:
        return f"peer access does not work: {failure}"
    if path is not None:
        _keep(path, record)
    return ""


def _word(writer: int, reader: int, part: int) -> int:
    """Return a word that identifies writer, reader and part; it is never 0 or all ones, and its bytes differ."""
    return 0x5A000001 + (part << 20) + (writer << 12) + (reader << 4)


def _pattern(writer: int, reader: int) -> bytes:
    return b"".join(_word(writer, reader, part).to_bytes(4, "little") * _WORDS for part in range(_PARTS))


def _write(driver: Driver, rank: int, addresses: Sequence[int]) -> str:
    """Write this rank's patterns into every region, including its own; return why that failed, or ""."""
    try:
        with own_stream(driver) as stream:
            for peer, address in enumerate(addresses):
                for part in range(_PARTS):
                    place = address + PROBE_BYTES * rank + 4 * _WORDS * part
                    driver.memset_d32(place, _word(rank, peer, part), _WORDS, stream)
    except CommError as error:
        return str(error)
    return ""


def _look(driver: Driver, peers: PeerExchange, addresses: Sequence[int]) -> str:
    """Return which writes did not arrive in this rank's region, and which regions of peers cannot be read."""
    lost: list[str] = []
    own = addresses[peers.rank]
    try:
        with own_stream(driver) as stream:
            for writer, (rank, address) in enumerate(zip(peers.ranks, addresses, strict=True)):
                seen = driver.memcpy_dtoh(own + PROBE_BYTES * writer, PROBE_BYTES, stream)
                if seen != _pattern(writer, peers.rank):
                    lost.append(f"what rank {rank} wrote here did not arrive")
                # Read what the peer wrote into its own region.
                seen = driver.memcpy_dtoh(address + PROBE_BYTES * writer, PROBE_BYTES, stream)
                if seen != _pattern(writer, writer):
                    lost.append(f"what is in the memory of rank {rank} cannot be read here")
    except CommError as error:
        lost.append(str(error))
    return "; ".join(lost)


def _clear(driver: Driver, address: int, nbytes: int) -> str:
    try:
        with own_stream(driver) as stream:
            driver.memset_d32(address, 0, nbytes // 4, stream)
    except CommError as error:
        return str(error)
    return ""


# --- the cache ------------------------------------------------------------------------------------------------


def _path(directory: Path, record: _Record) -> Path:
    return directory / f"peer-access-{hashlib.sha256(msgspec.json.encode(record)).hexdigest()[:24]}.json"


def _why_unknown(path: Path, record: _Record) -> str:
    """Return "" if the cache holds this result, else why not. An unusable file is logged and left unchanged."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return "it was not tried before"
    except OSError as error:
        return _ignored(path, str(error))
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
            return _ignored(path, "it is not a file that only this user can write")
        data = file.read(_MOST_FILE_BYTES)
    try:
        found = msgspec.json.decode(data, type=_Record)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return _ignored(path, f"it is not a test result: {error}")
    return "" if found == record else _ignored(path, "it is about something else")


def _ignored(path: Path, why: str) -> str:
    logger.warning("ignored %s: %s", path, why)
    return f"the kept result was ignored: {why}"


def _keep(path: Path, record: _Record) -> None:
    """Write the result; several ranks may write the same content at the same time."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, msgspec.json.encode(record))
    except OSError as error:
        # The result is valid; the next start tests again.
        logger.warning("the result of the peer access test was not kept: %s", error)
