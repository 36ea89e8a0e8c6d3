"""What ranks tell each other before and while they connect NCCL, over the host plane."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from device_comm.base import CommunicatorContext
from device_comm.nccl.library import NcclLibrary
from device_comm.nccl.window import Wish
from shm_broadcast.errors import DecodeError, DisagreementError, InternalError, NcclError


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The message that each rank sends to the others before they connect."""

    version: int
    library: str
    unique_id: bytes = b""
    function: str = ""
    code: int | None = None
    failure: str = ""
    window_bytes: int = 0
    obstacle: str = ""


_View = TypeVar("_View", Facts, str)


def agree(context: CommunicatorContext, library: NcclLibrary, wish: Wish | None) -> tuple[bytes, str]:
    """Return the id that rank 0 created, and why there will be no window or an empty text. Collective.

    Raises:
        DisagreementError: The ranks have different versions of NCCL.
        NcclError: Rank 0 could not create an id. All ranks raise either, and the group is intact.
    """
    own = Facts(library.version, str(library))
    if wish is not None:
        own = msgspec.structs.replace(own, window_bytes=wish.nbytes, obstacle=wish.obstacle)
    mine: NcclError | None = None
    if context.rank_in_group == 0:
        try:
            own = msgspec.structs.replace(own, unique_id=library.new_unique_id())
        except NcclError as error:
            mine = error
            own = msgspec.structs.replace(own, function=error.function, code=error.code, failure=str(error))
    views = _shared(context, own, Facts)
    where, ranks = context.health.where("connect"), context.ranks
    if len({view.version for view in views}) > 1:
        texts = {rank: view.library for rank, view in zip(ranks, views, strict=True)}
        listed = ", ".join(f"rank {rank}: {text}" for rank, text in texts.items())
        raise DisagreementError(f"{where}: the ranks have different versions of NCCL: {listed}", views=texts)
    first = views[0]
    if first.failure:
        text = f"{where}: rank {ranks[0]} could not begin: {first.failure}"
        raise NcclError(text, library=first.library, function=first.function, code=first.code) from mine
    return first.unique_id, _window_obstacle(context, views)


def _window_obstacle(context: CommunicatorContext, views: list[Facts]) -> str:
    sizes = [view.window_bytes for view in views]
    if not any(sizes):
        return "cuda.nccl_window_bytes is 0"
    if len(set(sizes)) > 1:
        return f"the ranks want windows of {sizes} bytes"
    return _first(context, [view.obstacle for view in views])


def first_trouble(context: CommunicatorContext, trouble: str) -> str:
    """Tell the others this rank's trouble, or an empty text; return the first one and whose it is. Collective."""
    return _first(context, _shared(context, trouble, str))


def _first(context: CommunicatorContext, troubles: list[str]) -> str:
    named = zip(context.ranks, troubles, strict=True)
    return next((f"rank {rank}: {trouble}" for rank, trouble in named if trouble), "")


def _shared(context: CommunicatorContext, own: _View, kind: type[_View]) -> list[_View]:
    """Return what each rank passes here, in the order of the ranks. Collective."""
    if context.exchange is None:
        raise InternalError(f"{context.name!r}: NCCL needs the host plane's exchange to agree on an id")
    try:
        return [
            msgspec.msgpack.decode(view, type=kind) for view in context.exchange(msgspec.msgpack.encode(own))
        ]
    except msgspec.DecodeError as error:
        raise DecodeError(f"{context.health.where('connect')}: a rank sent no facts: {error}") from error


__all__ = ["agree", "first_trouble"]
