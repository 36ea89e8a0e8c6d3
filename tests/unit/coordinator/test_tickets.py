"""Offers and tickets of a meeting: what they hold, and which start they are good for."""

import itertools
import os
import socket
from functools import partial

import msgspec
import pytest

from coordinator.meeting import Offer, Ticket, make_tickets, offer, withdraw
from coordinator.meeting.offers import take
from coordinator.meeting.tickets import checked
from coordinator.parallel_state import init_distributed_environment
from shm_broadcast.errors import UsageError
from tests.handlers import handling_at

HERE = "127.0.0.1"
PLACES = [(0, 2), (1, 2)]


def test_a_ticket_tells_a_rank_its_place_and_where_rank_0_listens() -> None:
    """All tickets name one meeting; each answers one offer; the driver chooses nothing else."""
    first, second = offer(HERE), offer()
    tickets = make_tickets([first, second], PLACES)
    assert [ticket.rank for ticket in tickets] == [0, 1]
    assert [ticket.offer for ticket in tickets] == [first.token, second.token]
    assert {(ticket.host, ticket.port, ticket.world_size) for ticket in tickets} == {(HERE, first.port, 2)}
    assert [(ticket.local_rank, ticket.local_world_size) for ticket in tickets] == PLACES
    assert len({ticket.meeting for ticket in tickets}) == 1
    for each in (first, second):
        withdraw(each.token)


@pytest.mark.guarantee("M2")
def test_nobody_can_take_the_port_between_offer_and_ticket() -> None:
    """The descriptor listens from the offer on, and is the one that the ticket hands out."""
    made = offer(HERE)
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind((HERE, made.port))
    with socket.create_connection((HERE, made.port), timeout=10):
        pass
    ticket = make_tickets([made], [(0, 1)])[0]
    listener = take(ticket)
    assert listener is not None
    assert listener.getsockname() == (HERE, made.port)
    listener.close()


@pytest.mark.guarantee("M2")
def test_the_port_comes_from_the_range_that_was_given() -> None:
    """A port that is taken is passed over; if all are, the error names the last one."""
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen on {HERE}:{port}"):
            offer(HERE, (port, port))
        made = offer(HERE, (port, min(port + 20, 65535)))
    assert port < made.port <= port + 20
    withdraw(made.token)


@pytest.mark.guarantee("M2")
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_address_is_refused(host: str) -> None:
    """The store of a meeting listens where the driver says, and nowhere else."""
    with pytest.raises(UsageError, match="wildcard"):
        offer(host)


def test_a_withdrawn_offer_closes_its_port() -> None:
    """Whoever connects then is refused, and the ticket is good for nothing. A second time changes nothing."""
    made = offer(HERE)
    ticket = make_tickets([made], [(0, 1)])[0]
    withdraw(made.token)
    withdraw(made.token)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HERE, made.port), timeout=10)
    with pytest.raises(UsageError, match="withdrawn the offer"):
        take(ticket)


@pytest.mark.guarantee("M1")
def test_a_ticket_is_good_for_one_start() -> None:
    """The second use, and that of a process which has made no such offer, say what to do."""
    made = offer()
    tickets = make_tickets([offer(HERE), made], PLACES)
    assert take(tickets[1]) is None
    with pytest.raises(UsageError, match=r"rank 1 of 2 .*has used the ticket before.*make new tickets"):
        take(tickets[1])
    with pytest.raises(UsageError, match="was started anew"):
        take(msgspec.structs.replace(tickets[1], offer="0" * 32))
    withdraw(tickets[0].offer)


@pytest.mark.guarantee("M1")
def test_a_forked_child_cannot_use_the_ticket() -> None:
    """The child holds a copy of the descriptor, and two processes must not serve from it."""
    made = offer(HERE)
    ticket = make_tickets([made], [(0, 1)])[0]
    child = os.fork()
    if child == 0:
        try:
            take(ticket)
        except UsageError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    listener = take(ticket)
    assert listener is not None
    listener.close()


def test_only_rank_0_may_listen() -> None:
    """Tickets that were mixed up are refused, and the offers stay open."""
    listening, silent = offer(HERE), offer()
    zero, one = make_tickets([listening, silent], PLACES)
    swapped = msgspec.structs.replace(one, offer=listening.token)
    with pytest.raises(UsageError, match="offer that listens: rank 0 serves the store"):
        take(swapped)
    listener = take(zero)
    assert listener is not None
    listener.close()
    assert take(one) is None


TICKET = Ticket(
    meeting="a" * 32,
    offer="b" * 32,
    host=HERE,
    port=1,
    rank=0,
    world_size=2,
    local_rank=0,
    local_world_size=1,
)


@pytest.mark.guarantee("M4")
@pytest.mark.parametrize(
    "changes",
    [
        {"rank": 2},
        {"rank": -1},
        {"rank": "0"},
        {"world_size": 0},
        {"local_rank": 1},
        {"host": ""},
        {"host": "a b"},
        {"host": "h" * 256},
        {"host": b"h"},
        {"port": 0},
        {"port": 65536},
        {"port": 1.5},
        {"meeting": "a" * 33},
        {"meeting": "../" + "a" * 29},
        {"offer": None},
    ],
    ids=str,
)
def test_a_ticket_that_nobody_has_made_is_refused(changes: dict[str, object]) -> None:
    """Every field is looked at where it arrives: other types, numbers out of range, text that is long or odd."""
    ticket = msgspec.structs.replace(TICKET, **changes)
    with pytest.raises(UsageError, match="none that make_tickets has made"):
        init_distributed_environment(meeting=ticket)


@pytest.mark.guarantee("M4")
def test_a_ticket_is_small() -> None:
    """The largest one is below 1 KB, and JSON brings it back as it was."""
    largest = msgspec.structs.replace(
        TICKET, host="h" * 255, port=65535, rank=2**31 - 3, world_size=2**31 - 2, local_world_size=2**31 - 2
    )
    packed = msgspec.json.encode(checked(largest))
    assert len(packed) < 1024
    assert msgspec.json.decode(packed, type=Ticket) == largest
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(packed.replace(b'"port"', b'"pipe"'), type=Ticket)


@pytest.mark.guarantee("M4")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rank": 1}, "rank=1, but meeting is a ticket for rank 0 of 2"),
        ({"world_size": 3}, "world_size=3, but meeting is a ticket"),
        ({"distributed_init_method": f"tcp://{HERE}:29500"}, "pass no distributed_init_method"),
        ({"elastic": True}, "elastic=True needs a store that outlives every rank"),
    ],
)
def test_an_argument_that_contradicts_the_ticket_is_refused(arguments: dict[str, object], text: str) -> None:
    """What agrees with the ticket is allowed; the test below in several processes passes it."""
    with pytest.raises(UsageError, match=text):
        init_distributed_environment(meeting=TICKET, **arguments)  # type: ignore[arg-type]


def test_something_else_is_no_ticket() -> None:
    """The error names the type."""
    with pytest.raises(UsageError, match=r"must be a coordinator\.meeting\.Ticket, not str"):
        init_distributed_environment(meeting="ticket")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("offers", "places", "text"),
    [
        ([], [], "one offer per rank"),
        ([Offer(token="a" * 32, pid=1)], [(0, 1)], "rank 0 must listen"),
        ([Offer(token="a" * 32, pid=1, host=HERE, port=1)], [(0, 1), (0, 1)], "1 offers and 2 places"),
        ([Offer(token="a" * 32, pid=1, host=HERE, port=1)] * 2, PLACES, "one offer for two ranks"),
        ([Offer(token="a" * 32, pid=1, host=HERE, port=1)], [(1, 1)], "local rank 1 of 1"),
    ],
)
def test_tickets_need_one_offer_for_each_place(
    offers: list[Offer], places: list[tuple[int, int]], text: str
) -> None:
    """The driver's mistakes are found before a ticket leaves it."""
    with pytest.raises(UsageError, match=text):
        make_tickets(offers, places)


def test_ports_need_an_address() -> None:
    """Only the process that listens has use for a range, and a range has an order."""
    with pytest.raises(UsageError, match="pass host too"):
        offer(ports=(1, 2))
    with pytest.raises(UsageError, match="first and the last one"):
        offer(HERE, (30, 20))


@pytest.mark.guarantee("M2")
def test_a_handler_may_withdraw_an_offer_while_another_one_is_made() -> None:
    """It runs in every place of `offer`, and waits for nobody."""
    for step in itertools.count():
        first, made = offer(HERE), list[Offer]()

        def make(made: list[Offer] = made) -> None:
            made.append(offer(HERE))

        has_come = handling_at(step, make, partial(withdraw, first.token), ("/offers.py", "/liveness.py"))
        withdraw(made[0].token)
        if not has_come:
            withdraw(first.token)
            break
    assert step > 3
