"""How the ranks of a job with a secret meet: in the secured store of rank 0 instead of one of torch's."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Annotated, Final

import msgspec
import torch.distributed as dist

from coordinator.addresses.names import Address
from coordinator.bootstrap.blocking_calls import pause_after, run_interruptibly, torch_error
from coordinator.bootstrap.serving import allow_descriptors
from coordinator.meeting.losses import report_loss
from coordinator.security import secret
from coordinator.security.place import Place
from coordinator.security.store import SecuredStore, secured
from coordinator.settings import CoordinatorSettings
from coordinator.stores import is_local
from shm_broadcast.endpoint import bind_host
from shm_broadcast.errors import ClosedError, CommTimeoutError, DecodeError, UsageError

__all__ = ["find_store", "meet_by_hint", "place_of", "report_losses", "serve_store"]

_HINT: Final = "group_coordinator/endpoint"
_LONGEST_HINT: Final = 256
# How much longer than `create_timeout_s` the launcher's store may take, whose calls have no deadline of their own.
_ANSWER_S: Final = 2.0
# If there are several addresses, each one that accepts connections gets this long to answer. That is longer
# than zmq allows a silent handshake.
_TRY_S: Final = 3.0
_PROBE_S: Final = 0.25
_PAUSE_S: Final = 0.05
# Between looks for the hint in a store that is served: most ranks come within a second of rank 0.
_PAUSES_S: Final = (0.1, 0.2, 0.4, 1.0)


class Hint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where rank 0 serves the secured store. Whoever reaches the store that holds it may have written it."""

    address: str
    port: Annotated[int, msgspec.Meta(gt=0, lt=65536)]


_hint_decoder: Final = msgspec.json.Decoder(Hint)


def place_of(settings: CoordinatorSettings, run: str, rank: int, world_size: int) -> Place | None:
    """Return this process's place in a job with a secret; None if the settings name none. Reads the secret.

    Raises:
        UsageError: What they name holds no secret, or not only this user can read it.
    """
    if settings.secret_file is not None:
        return Place(secret.from_file(settings.secret_file), run, rank, world_size, settings.remote)
    if settings.secret_descriptor is not None:
        held = secret.from_descriptor(settings.secret_descriptor)
        return Place(held, run, rank, world_size, settings.remote)
    return None


def serve_store(
    place: Place, address: str, port: int, timeout_s: float, over: threading.Event, listener: socket.socket
) -> SecuredStore:
    """Return the store that this process, rank 0, serves at a known address; runs on a thread.

    Args:
        place: This process's place.
        address: Numeric address on which `listener` listens.
        port: The port on which it does.
        timeout_s: How long to try, in seconds.
        over: Set once nobody waits for the result any more.
        listener: It is used up.

    Raises:
        CapabilityError: The kernel refuses a descriptor.
        ClosedError: `over` was set meanwhile.
    """
    from coordinator.security.opening import serve_at  # it loads zmq

    check = partial(_check_awaited, place, over)
    return serve_at(place, address, (port, port), timeout_s, check, listener.detach())


def find_store(
    place: Place, addresses: Sequence[Address], timeout_s: float, over: threading.Event, told_by: str = ""
) -> SecuredStore:
    """Return the store that rank 0 serves at one of some addresses; runs on a thread.

    Args:
        place: This process's place.
        addresses: Where to look, in this order.
        timeout_s: How long to try, in seconds.
        over: Set once nobody waits for the result any more.
        told_by: Who named the addresses, for errors.

    Raises:
        UsageError: Rank 0 refuses this rank.
        CommTimeoutError: No store of this run answered there; `.missing` names rank 0.
        ClosedError: `over` was set meanwhile.
    """
    from coordinator.security.opening import connect_to  # it loads zmq

    end, check = time.monotonic() + timeout_s, partial(_check_awaited, place, over)
    if len(addresses) == 1:
        host, port, *_ = addresses[0].target
        return connect_to(place, host, port, timeout_s, check, told_by=told_by)
    # Rank 0 listens on one of them. On the others somebody else may.
    while time.monotonic() < end:
        for host, port, *_ in [each.target for each in addresses if _accepts(each)]:
            try:
                return connect_to(place, host, port, min(_TRY_S, end - time.monotonic()), check)
            except CommTimeoutError:
                if time.monotonic() >= end:
                    raise
        check()
        over.wait(_PAUSE_S)
    texts, port = ", ".join(each.text for each in addresses), addresses[0].target[1]
    raise CommTimeoutError(
        f"{place.where}: the store of run {place.run!r} did not answer at port {port} of {texts} within "
        f"{timeout_s:.1f} s; nobody listens there",
        missing=(0,),
    )


def _accepts(address: Address) -> bool:
    """Return whether somebody accepts connections there now."""
    with socket.socket(address.family, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        return probe.connect_ex(address.target) == 0


def _check_awaited(place: Place, over: threading.Event) -> None:
    if over.is_set():
        raise ClosedError(f"{place.where}: nobody waits any more")


def meet_by_hint(
    place: Place,
    outer: dist.Store,
    address: str,
    settings: CoordinatorSettings,
    check: Callable[[], None],
) -> SecuredStore:
    """Return the secured store of ranks that meet in another store first, which tells them where rank 0 serves.

    Args:
        place: This process's place.
        outer: The other store, which nobody vouches for; its keys belong to this run.
        address: On rank 0 the numeric address to serve at.
        settings: The ports, and the deadline.
        check: Called about ten times a second; what it raises ends the attempt.

    Raises:
        DecodeError: The other store names no endpoint.
        CommTimeoutError: No store of this run answered at the endpoint in time; the text names it. Or the other store
            did not answer.
    """
    from coordinator.security.opening import serve_at  # it loads zmq

    timeout_s, over, is_told = settings.create_timeout_s, threading.Event(), threading.Event()
    end = time.monotonic() + timeout_s + _ANSWER_S

    def check_all() -> None:
        check()
        if not is_told.is_set() and time.monotonic() >= end:
            raise CommTimeoutError(
                f"{place.where}: the launcher's store did not answer within {timeout_s + _ANSWER_S:.1f} s"
            )

    def serve() -> SecuredStore:
        allow_descriptors(place.world_size)
        check_awaited = partial(_check_awaited, place, over)
        store = serve_at(place, address, settings.remote_port_range, timeout_s, check_awaited)
        try:
            check_awaited()
            outer.set(_HINT, msgspec.json.encode(Hint(address, store.port)).decode())
        except BaseException:
            store.close()
            raise
        is_told.set()
        return store

    def find() -> SecuredStore:
        hint = _await_hint(place, outer, timeout_s, over)
        is_told.set()
        where = Address(socket.AF_INET6 if ":" in hint.address else socket.AF_INET, (hint.address, hint.port))
        told_by = f", which the launcher's store names as rank 0's endpoint{_UNTRUSTED},"
        return find_store(place, [where], timeout_s, over, told_by)

    try:
        try:
            # Nothing is called behind this: an interrupt would lose the store, which nobody else could close.
            return run_interruptibly(
                find if place.rank else serve, "rendezvous", check_all, SecuredStore.close
            )
        except BaseException:
            over.set()
            raise
    except dist.DistError as error:
        raise torch_error(
            f"{place.where}: lost the connection to the launcher's store: {error}", "Store"
        ) from error


_UNTRUSTED: Final = " (whoever reaches that store may have changed it)"


def _await_hint(place: Place, outer: dist.Store, timeout_s: float, over: threading.Event) -> Hint:
    """Return the hint once rank 0 has told it.

    Polls the store, since nothing could end a blocking wait there, and torch warns of one that ends without a
    value. In a store that is served over a network, where thousands of ranks may wait, there are four looks
    in the first second and one in each further one.
    """
    start = time.monotonic()
    pauses = repeat(0.0) if is_local(outer) else chain(_PAUSES_S, repeat(_PAUSES_S[-1]))
    while not outer.check([_HINT]):
        waited_s = time.monotonic() - start
        if waited_s >= timeout_s:
            raise CommTimeoutError(
                f"{place.where}: rank 0 has not told the launcher's store within {timeout_s:.1f} s where it serves",
                missing=(0,),
            )
        over.wait(min(max(next(pauses), pause_after(waited_s)), timeout_s - waited_s))
        _check_awaited(place, over)
    content = outer.get(_HINT)
    try:
        hint = _hint_decoder.decode(content[:_LONGEST_HINT])
        bind_host(hint.address)
    except (msgspec.MsgspecError, UsageError, UnicodeDecodeError) as error:
        raise DecodeError(
            f"{place.where}: what the launcher's store holds is no endpoint of rank 0{_UNTRUSTED}: {error}"
        ) from error
    return hint


def report_losses(store: dist.Store) -> set[int]:
    """Let a secured store report ranks whose connection breaks, except for those that the result contains.

    The caller adds the ranks that no network separates from this one: of their end the kernel tells.
    """
    near = set[int]()

    def on_lost(rank: int, how: str) -> None:
        if rank not in near:
            report_loss(rank, how)

    base = secured(store)
    if base is not None:
        base.watch(on_lost)
    return near
