"""Open the links of groups that are being created, between ranks that tell each other through the store where."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import torch.distributed as dist

from coordinator.bootstrap.blocking_calls import UNREADABLE, run_interruptibly, torch_error
from coordinator.heartbeats.handshake import TOKEN_BYTES, Meeting, Target, listen_at
from coordinator.heartbeats.links import Link
from coordinator.heartbeats.watching import Heartbeats
from shm_broadcast.errors import CommTimeoutError
from shm_broadcast.interruption import raised_by_handler

__all__ = ["Page", "join_heartbeats"]

_MOST_BYTES: Final = 1 << 20


class Page(msgspec.Struct, frozen=True):
    """What a rank tells its partners.

    Attributes:
        address: Numeric address on which it listens for those with higher ranks.
        port: The port; 0 if there are none.
        token: What they need to be admitted.
        links: The names of the links that it has open, by partner.
        serves_store: Whether its host serves the world's store.
    """

    address: str
    port: int
    token: bytes
    links: dict[int, str]
    serves_store: bool


_decoder: Final = msgspec.json.Decoder(Page)


def join_heartbeats(
    heartbeats: Heartbeats,
    rank: int,
    partners: Sequence[int],
    store: dist.Store,
    address: str,
    *,
    serves_store: bool,
    check: Callable[[], None],
    where: str,
    timeout_s: float,
) -> None:
    """Open the links to `partners` that are not open. Collective over them; each calls this with this rank.

    Args:
        heartbeats: Where the links are kept, which are in use already.
        rank: This process's rank.
        partners: The ranks to which links are needed.
        store: A store whose keys are used by this creation only, over a connection that no other thread uses.
        address: The numeric address that this rank announces.
        serves_store: Whether this host serves the world's store.
        check: Called about ten times a second; what it raises ends this.
        where: The beginning of an error's text.
        timeout_s: Deadline in seconds.

    Raises:
        CommTimeoutError: A partner did not come; `.missing` names the partners.
        NativeError: The store is gone, or a partner's host refuses connections.
    """
    end = time.monotonic() + timeout_s
    token, links = secrets.token_bytes(TOKEN_BYTES), heartbeats.names(partners)
    listener = listen_at(address) if any(rank < partner for partner in partners) else None
    try:
        port = 0 if listener is None else listener.getsockname()[1]
        own = Page(address, port, token, links, serves_store)
        pages = _exchanged(store, rank, partners, own, check, where, end)
    except BaseException:
        if listener is not None:
            listener.close()
        raise
    needed = [each for each in partners if links.get(each, "") != pages[each].links.get(rank)]
    targets = {each: _target(pages[each]) for each in needed if each < rank}
    meeting = Meeting(rank, listener, token, [each for each in needed if each > rank], targets)
    for partner, opened in meeting.run(check, where, max(end - time.monotonic(), 0.0)).items():
        heartbeats.add(Link(partner, opened.connection, opened.name, heartbeats.lost_after_s))
    for partner, page in pages.items():
        if page.serves_store:
            heartbeats.store_is_with(partner)


def _target(page: Page) -> Target:
    return Target(page.address, page.port, page.token)


def _exchanged(
    store: dist.Store,
    rank: int,
    partners: Sequence[int],
    own: Page,
    check: Callable[[], None],
    where: str,
    end: float,
) -> Mapping[int, Page]:
    """Publish this rank's page, and return those of its partners once all have published theirs."""

    def exchange() -> dict[int, Page]:
        store.set(_key(rank), msgspec.json.encode(own).decode())
        found = store.multi_get([_key(partner) for partner in partners])
        return {partner: _decoded(page) for partner, page in zip(partners, found, strict=True)}

    def check_time() -> None:
        check()
        if time.monotonic() >= end:
            raise CommTimeoutError(f"{where}: the partners for heartbeats have not come", missing=partners)

    try:
        return run_interruptibly(exchange, "heartbeats", check_time)
    except UNREADABLE as error:
        if raised_by_handler(error):
            raise
        raise torch_error(f"{where}: the store holds no page of a partner: {error}", "Store") from error
    except RuntimeError as error:
        if raised_by_handler(error):
            raise
        raise torch_error(f"{where}: lost the connection to the store: {error}", "Store") from error


def _key(rank: int) -> str:
    return f"heartbeats/{rank}"


def _decoded(page: bytes) -> Page:
    if len(page) > _MOST_BYTES:
        raise msgspec.ValidationError(f"it has {len(page)} bytes")
    decoded: Page = _decoder.decode(page)
    return decoded
