"""What ranks tell each other before and while they connect NCCL, over the host plane."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from device_comm.base import CommunicatorContext
from device_comm.nccl.library import ROOTS_FUNCTIONS, NcclLibrary
from device_comm.nccl.window import Wish
from shm_broadcast.errors import DecodeError, DisagreementError, InternalError, NcclError

RANKS_PER_ROOT: Final = 128
"""How many ranks meet at one root; see `roots_of`."""


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
    has_several_roots: bool = False


_View = TypeVar("_View", Facts, str)


def roots_of(world_size: int, has_several: bool) -> range:
    """Return the ranks of a group that create an id each: NCCL spreads its bootstrap over all of them.

    With one id, all ranks connect to one process at the start. That a root has 128 ranks at most is torch's choice,
    too (pytorch/pytorch#191983). A library before 2.23 takes only one id: `has_several` is then false.
    """
    return range(0, world_size, RANKS_PER_ROOT) if has_several else range(1)


def agree(
    context: CommunicatorContext, library: NcclLibrary, wish: Wish | None
) -> tuple[tuple[bytes, ...], str]:
    """Return the ids that the roots created, and why there will be no window or an empty text. Collective.

    Raises:
        DisagreementError: The ranks have different versions of NCCL.
        NcclError: A root could not create an id. All ranks raise either, and the group is intact.
    """
    has_several = ROOTS_FUNCTIONS.keys() <= library.functions.keys()
    own = Facts(library.version, str(library), has_several_roots=has_several)
    if wish is not None:
        own = msgspec.structs.replace(own, window_bytes=wish.nbytes, obstacle=wish.obstacle)
    mine: NcclError | None = None
    if context.rank_in_group in roots_of(context.world_size, has_several):
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
    roots = roots_of(context.world_size, all(view.has_several_roots for view in views))
    for root in roots:
        view = views[root]
        if view.failure:
            text = f"{where}: rank {ranks[root]} could not begin: {view.failure}"
            cause = mine if root == context.rank_in_group else None
            raise NcclError(text, library=view.library, function=view.function, code=view.code) from cause
    return tuple(views[root].unique_id for root in roots), _window_obstacle(context, views)


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
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"{context.health.where('connect')}: a rank sent no facts: {error}") from error


__all__ = ["agree", "first_trouble"]
