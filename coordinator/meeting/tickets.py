"""What travels when processes meet by ticket: offers to the driver, and tickets back.

Both are frozen, hold numbers and short text, and are at most 1 KB as JSON. Whoever can change a ticket on its way can
send a rank to another store: carry it as safely as what starts the processes.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated

import msgspec

from shm_broadcast.errors import UsageError

__all__ = ["Offer", "Ticket", "make_tickets"]

_MOST_RANKS = 2**31 - 1

_Token = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
_Host = Annotated[str, msgspec.Meta(pattern="^[!-~]*$", max_length=255)]
_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=_MOST_RANKS)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=_MOST_RANKS)]


class Offer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One process's readiness to start once.

    Attributes:
        token: Names the offer; random, 32 hexadecimal digits.
        pid: The process, for errors.
        host: The address on which it listens, if it is to be rank 0; else empty.
        port: The TCP port; 0 if it does not listen.
    """

    token: _Token
    pid: Annotated[int, msgspec.Meta(ge=1)]
    host: _Host = ""
    port: _Port = 0


class Ticket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's place in one meeting; good for one start of the process that has made the offer.

    Attributes:
        meeting: Names the meeting, the same for all ranks; random, 32 hexadecimal digits.
        offer: The token of the offer that it answers.
        host: The address on which rank 0 listens.
        port: Rank 0's TCP port.
        rank: The process's rank in the world.
        world_size: The number of ranks.
        local_rank: Its place among the ranks of its host, from 0: the index of its device.
        local_world_size: The number of ranks on its host.
    """

    meeting: _Token
    offer: _Token
    host: Annotated[str, msgspec.Meta(pattern="^[!-~]+$", max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    rank: _Rank
    world_size: _Count
    local_rank: _Rank
    local_world_size: _Count

    def __str__(self) -> str:
        """Return the place without the random names."""
        return f"ticket for rank {self.rank} of {self.world_size} at {self.host}:{self.port}"


def checked(ticket: object) -> Ticket:
    """Return `ticket` after a look at every field: it has come from another process.

    Raises:
        UsageError: It is no ticket, or holds what no ticket holds.
    """
    if not isinstance(ticket, Ticket):
        raise UsageError(f"meeting must be a coordinator.meeting.Ticket, not {type(ticket).__name__}")
    try:
        # The constructor of a struct checks no types.
        msgspec.convert(msgspec.structs.asdict(ticket), Ticket)
    except msgspec.ValidationError as error:
        raise UsageError(f"the ticket is none that make_tickets has made: {error}") from error
    if ticket.rank >= ticket.world_size or ticket.local_rank >= ticket.local_world_size:
        raise UsageError(
            f"the ticket is none that make_tickets has made: rank {ticket.rank} of {ticket.world_size}, local rank "
            f"{ticket.local_rank} of {ticket.local_world_size}"
        )
    return ticket


def check_beside(ticket: Ticket, world_size: int, rank: int, init_method: str, is_elastic: bool) -> None:
    """Raise `UsageError` if an argument of `init_distributed_environment` contradicts its ticket."""
    if init_method != "env://":
        raise UsageError(f"the {ticket} says where the ranks meet: pass no distributed_init_method beside it")
    if is_elastic:
        raise UsageError(
            f"elastic=True needs a store that outlives every rank, and by the {ticket} rank 0 serves it"
        )
    for name, given, told in (("world_size", world_size, ticket.world_size), ("rank", rank, ticket.rank)):
        if given not in (-1, told):
            raise UsageError(f"{name}={given}, but meeting is a {ticket}")


def make_tickets(offers: Sequence[Offer], places: Sequence[tuple[int, int]]) -> list[Ticket]:
    """Return a ticket for each offer, in the order of ranks. The driver calls this; nothing is sent.

    Args:
        offers: By rank; the first one listens.
        places: Local rank and number of ranks on the host, by rank.

    Raises:
        UsageError: There is no offer, the first one does not listen, or there are more or fewer places.
    """
    if not offers or not offers[0].port:
        raise UsageError("make_tickets needs one offer per rank, and that of rank 0 must listen: offer(host)")
    if len(places) != len(offers):
        raise UsageError(f"make_tickets got {len(offers)} offers and {len(places)} places")
    for rank, (local_rank, local_world_size) in enumerate(places):
        if not 0 <= local_rank < local_world_size:
            raise UsageError(
                f"make_tickets got local rank {local_rank} of {local_world_size} for rank {rank}"
            )
    if len({offer.token for offer in offers}) < len(offers):
        raise UsageError("make_tickets got one offer for two ranks")
    meeting, first = secrets.token_hex(16), offers[0]
    return [
        checked(
            Ticket(
                meeting=meeting,
                offer=offer.token,
                host=first.host,
                port=first.port,
                rank=rank,
                world_size=len(offers),
                local_rank=local_rank,
                local_world_size=local_world_size,
            )
        )
        for rank, (offer, (local_rank, local_world_size)) in enumerate(zip(offers, places, strict=True))
    ]
