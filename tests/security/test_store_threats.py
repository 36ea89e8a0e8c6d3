"""Whoever does not hold a job's secret gets nothing from its store, whatever is sent, changed or sent again."""

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any

import pytest
import torch.distributed as dist
import zmq

from coordinator.bootstrap.blocking_calls import ask_store
from coordinator.security import server as server_module
from coordinator.security.keys import keys_of_rank, keys_of_store
from coordinator.security.records import (
    LONGEST_QUESTION,
    NO_GENERATION,
    Add,
    Append,
    Await,
    Count,
    Has,
    Kind,
    Put,
    Read,
    Record,
    Remove,
    Swap,
    pack,
    packed,
    question_of,
    unpack,
)
from coordinator.security.secret import Secret
from coordinator.security.store import SecuredStore
from coordinator.security.table import Asker, Table
from shm_broadcast.endpoint import RemoteKeys
from shm_broadcast.errors import CommTimeoutError, DecodeError, NativeError, UsageError
from tests.relay import relay_to
from tests.secured import HERE, SECRET, VALUE, joined, ranks_of, served, server_of
from tests.waiting import wait_until

STRANGERS = 100
SHORT_S = 0.4
OTHER = Secret(bytes(range(100, 164)))
STOLEN = Put(["stolen"], [b"1"])


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects what a server in this process looks into: heads of records, and questions."""
    seen: list[str] = []

    def heads(data: memoryview) -> Record:
        seen.append(f"head of rank {unpack(data).rank}" if data.nbytes >= 32 else "head")
        return unpack(data)

    def questions(body: memoryview) -> Any:
        seen.append("question")
        return question_of(body)

    monkeypatch.setattr(server_module, "unpack", heads)
    monkeypatch.setattr(server_module, "question_of", questions)
    return seen


@contextmanager
def dialled(
    port: int, keys: RemoteKeys | None, server_key: bytes | None = None
) -> Iterator[zmq.Socket[bytes]]:
    """Connect a bare zmq socket to a store, with a pair of keys or without CURVE."""
    context: zmq.Context[Any] = zmq.Context()
    dialling = context.socket(zmq.DEALER)
    dialling.set(zmq.LINGER, 0)
    if keys is not None:
        dialling.set(zmq.CURVE_SERVERKEY, server_key or keys_of_store(SECRET, "run").public)
        dialling.set(zmq.CURVE_PUBLICKEY, keys.public)
        dialling.set(zmq.CURVE_SECRETKEY, keys.secret())
    dialling.connect(f"tcp://{HERE}:{port}")
    try:
        yield dialling
    finally:
        dialling.close(0)
        context.term()


def question(store: SecuredStore, rank: int, generation: bytes | None = None) -> bytes:
    """Return a question that would set a key, of a rank to the present start of the store or another."""
    known = bytes.fromhex(store.generation)
    return pack(Kind.QUESTION, rank, 7, known if generation is None else generation, packed(STOLEN))


def still_serves(first: SecuredStore, *ranks: int) -> None:
    """Check that ranks join and that nobody has stolen anything."""
    with joined(first.port, *ranks) as others:
        for each in others:
            each.set("fine", "1")
        assert first.get("fine") == b"1"
        assert not first.check(["stolen"])


# --- strangers ------------------------------------------------------------------------------------------------

WRONG_KEYS = {
    "no key": (None, None),
    "a key of its own": (RemoteKeys.generate(), None),
    "the key of another secret": (keys_of_rank(OTHER, "run", 1), None),
    "the key of another run": (keys_of_rank(SECRET, "run 2", 1), None),
    "the key of a rank that there is not": (keys_of_rank(SECRET, "run", 4), None),
    "the store's own key": (keys_of_store(SECRET, "run"), None),
    "another secret, for the store too": (keys_of_rank(OTHER, "run", 1), keys_of_store(OTHER, "run").public),
}


@pytest.mark.guarantee("K4")
@pytest.mark.parametrize("who", WRONG_KEYS)
def test_a_wrong_key_is_refused_before_a_byte_is_decoded(decoded: list[str], who: str) -> None:
    """Even with the store's public key and its generation, a stranger fails in the handshake."""
    keys, server_key = WRONG_KEYS[who]
    with served() as first:
        with dialled(first.port, keys, server_key) as stranger:
            for _ in range(5):
                stranger.send(question(first, 1))
            assert not stranger.poll(200)
            first.set("mine", "1")
        assert set(decoded) == {"head of rank 0", "question"}
        still_serves(first, 1)


@pytest.mark.guarantee("K4")
def test_the_right_key_is_no_other_rank(decoded: list[str]) -> None:
    """A rank that says another number is refused, and what it asks is not decoded; each rank has its own key."""
    with served() as first:
        before = decoded.count("question")
        with dialled(first.port, keys_of_rank(SECRET, "run", 2)) as rogue:
            rogue.send(question(first, 1))
            assert rogue.poll(10_000)
            refusal = unpack(memoryview(rogue.recv()))
            assert refusal.kind == Kind.REFUSED
            assert bytes(refusal.body) == b"it says rank 1, and its key belongs to rank 2"
        assert decoded.count("question") == before
        still_serves(first, 1, 2)


GARBAGE = {
    "nothing": b"",
    "noise": os.urandom(4096),
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "torch": b"\x00" + bytes(4) + bytes(range(64)),
    "zmtp without curve": b"\xff"
    + bytes(8)
    + b"\x7f\x03\x00NULL"
    + bytes(48)
    + b"\x04\x19\x05READY"
    + bytes(19),
    "half a handshake": b"\xff"
    + bytes(8)
    + b"\x7f\x03\x00CURVE"
    + bytes(47)
    + b"\x04\xc8\x05HELLO"
    + bytes(194),
    "endless": b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47) + b"\x06" + b"\xff" * 8 + bytes(100_000),
}


def surround(stack: ExitStack, port: int) -> None:
    """Open a hundred connections that stay: silent ones, garbage, wrong keys, right keys of wrong runs."""
    kinds = list(WRONG_KEYS.values())
    for number in range(STRANGERS):
        if number % 5:
            raw = stack.enter_context(socket.create_connection((HERE, port)))
            with contextlib.suppress(OSError):
                raw.sendall(list(GARBAGE.values())[number % len(GARBAGE)])
        else:
            keys, server_key = kinds[number % len(kinds)]
            stranger = stack.enter_context(dialled(port, keys, server_key))
            stranger.send(pack(Kind.HELLO, 1, 0, NO_GENERATION))


@pytest.mark.guarantee("K4")
def test_a_hundred_strangers_do_not_keep_the_ranks_out(decoded: list[str]) -> None:
    """All ranks join and work while a hundred connections of others stay open, of whose records none is looked into."""
    with served() as first, ExitStack() as stack:
        surround(stack, first.port)
        still_serves(first, 1, 2, 3)
        assert set(decoded) == {f"head of rank {rank}" for rank in range(4)} | {"question"}


@pytest.mark.guarantee("K4")
def test_who_says_nothing_is_disconnected() -> None:
    """A connection without a handshake is closed after two seconds."""
    with served() as first, socket.create_connection((HERE, first.port)) as silent:
        silent.settimeout(30.0)
        while silent.recv(4096):
            pass


WRONG_RECORDS = {
    "empty": b"",
    "short": bytes(31),
    "another version": b"\x04\x09" + bytes(30),
    "no question": pack(Kind.QUESTION, 2, 1, bytes(16), b"\xc1" * 100),
    "an answer": pack(Kind.ANSWER, 2, 1, bytes(16), packed(None)),
    "nesting": pack(Kind.QUESTION, 2, 1, bytes(16), b"\x91" * 5000),
}


@pytest.mark.guarantee("K4")
def test_nonsense_of_a_rank_costs_the_others_nothing() -> None:
    """What an admitted rank sends is bounded and checked; a record that is too long ends its own connection only."""
    with served() as first, dialled(first.port, keys_of_rank(SECRET, "run", 2)) as rogue:
        generation = bytes.fromhex(first.generation)
        for record in WRONG_RECORDS.values():
            rogue.send(record.replace(bytes(16), generation) if len(record) > 32 else record)
            rogue.send_multipart([record] * 3)
        rogue.send(pack(Kind.QUESTION, 2, 1, generation, packed(Put(["a", "b"], [b""]))))
        rogue.send(pack(Kind.QUESTION, 2, 1, generation, bytes(2 * LONGEST_QUESTION)))
        still_serves(first, 1, 3)


def test_each_decoder_says_what_is_wrong() -> None:
    """Neither a question nor an answer is anything else than one."""
    for body in (b"", b"\xc1", b"\x92\xa3put\x90", b"\x91" * 5000, packed(Put(["a"], []))):
        with pytest.raises(DecodeError):
            question_of(memoryview(body))


def test_changed_questions_leave_the_store_usable() -> None:
    """Each is answered, refused or waits; what a question says is all that it can do."""
    random, table = Random(7), Table()
    questions = [
        packed(each)
        for each in (
            Put(["a"], [b"1"]),
            Read(["a", "b"], 10),
            Await(["c"], 5),
            Has(["a"]),
            Add("n", 1),
            Swap("s", b"", b"x"),
            Append("l", b"y"),
            Remove("a"),
            Count(),
        )
    ]
    outcomes = Counter[str]()
    for number in range(3000):
        changed = bytearray(random.choice(questions))
        for _ in range(random.randrange(1, 4)):
            changed[random.randrange(len(changed))] = random.randrange(256)
        try:
            due = table.ask(Asker(b"r", number), question_of(memoryview(changed)), float(number))
            outcomes["answered" if due else "waits"] += 1
        except (DecodeError, UsageError) as error:
            outcomes[type(error).__name__] += 1
    assert min(outcomes[kind] for kind in ("answered", "waits", "DecodeError")) > 20
    table.expire(1e30)
    assert table.waiting == 0
    assert table.ask(Asker(b"r", 0), Swap("fresh", b"", b"1"), 0.0) == [(Asker(b"r", 0), b"1")]


# --- what is sent again, and what is changed ------------------------------------------------------------------


@pytest.mark.guarantee("K6")
def test_a_question_to_an_earlier_start_is_refused(decoded: list[str]) -> None:
    """Rank 0 has started again at the same place with the same keys; who belongs to the first start learns it."""
    with served() as first:
        port, old = first.port, bytes.fromhex(first.generation)
    with served(port=port) as second, dialled(port, keys_of_rank(SECRET, "run", 1)) as late:
        before = decoded.count("question")
        late.send(question(second, 1, old))
        assert late.poll(10_000)
        refusal = unpack(memoryview(late.recv()))
        assert (refusal.kind, bytes(refusal.body)) == (
            Kind.REFUSED,
            b"it belongs to an earlier start of this job",
        )
        assert decoded.count("question") == before
        still_serves(second, 1)


@pytest.mark.guarantee("K6")
def test_who_has_joined_an_earlier_start_does_not_slip_into_the_next() -> None:
    """Its connection ended with the first start, and it is not made again."""
    with ExitStack() as stack:
        first = stack.enter_context(served())
        (rank,) = stack.enter_context(joined(first.port, 1))
        first.close()
        with served(port=first.port) as second:
            with pytest.raises(dist.DistNetworkError, match="rank 0 has left"):
                rank.set("stolen", "1")
            still_serves(second, 1)


@pytest.mark.guarantee("K6")
@pytest.mark.parametrize("to", ["the same start", "the next start"])
def test_recorded_bytes_are_refused(decoded: list[str], to: str) -> None:
    """Each connection has keys of its own, which the server draws with the rank; bytes of another one fit to none."""
    with served() as first, relay_to(first.port) as relay:
        with joined(relay.port, 1) as (rank,):
            rank.set("recorded", "1")
        wait_until(lambda: 1 not in ranks_of(first), "the rank's BYE at the server")
        recorded = bytes(relay.recorded[0])
        assert len(recorded) > 300
        for held in (VALUE[8:24], keys_of_rank(SECRET, "run", 1).secret(), b"recorded"):
            assert held not in recorded
        with ExitStack() as stack:
            target = first
            if to == "the next start":
                first.close()
                target = stack.enter_context(served(port=first.port))
            seen = len(decoded)
            for _ in range(3):
                raw = stack.enter_context(socket.create_connection((HERE, target.port)))
                raw.settimeout(30.0)
                with contextlib.suppress(OSError):
                    raw.sendall(recorded)
                    while raw.recv(4096):  # until the server ends the connection
                        pass
            assert decoded[seen:] == []
            still_serves(target, 1)


def flipped(piece: bytes) -> bytes:
    """Return the bytes with one bit of the last one changed."""
    return piece[:-1] + bytes([piece[-1] ^ 1])


@pytest.mark.guarantee("K6")
@pytest.mark.parametrize("direction", ["to_server", "to_client"])
def test_a_changed_byte_ends_the_connection_with_an_error(decoded: list[str], direction: str) -> None:
    """Behind the handshake, in either direction: torch's error, ours from a call, and nobody gets what was changed."""
    with served() as first, relay_to(first.port) as relay, joined(relay.port, 1) as (rank,):
        rank.set("before", "1")
        seen = len(decoded)
        setattr(relay, direction, flipped)
        with pytest.raises(dist.DistNetworkError, match="somebody changed what is sent"):
            rank.set("changed", "2")
        with pytest.raises(NativeError, match="lost the connection to the world's store"):
            ask_store(lambda: rank.get("before"), "a group's call", 10.0)
        if direction == "to_server":
            assert decoded[seen:] == []
            assert not first.check(["changed"])
        still_serves(first, 1)


@pytest.mark.guarantee("K6")
def test_a_changed_byte_in_the_handshake_is_no_join(decoded: list[str]) -> None:
    """The rank goes on trying until its deadline, and the error says how it failed."""
    with served() as first, relay_to(first.port) as relay:
        relay.to_server = flipped
        seen = len(decoded)
        with (
            pytest.raises(CommTimeoutError, match=r"handshake.*failed|said nothing"),
            joined(relay.port, 1, timeout_s=SHORT_S),
        ):
            pass
        assert decoded[seen:] == []
        still_serves(first, 1)


# --- two jobs -------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("K4")
def test_two_jobs_with_one_secret_do_not_mix(decoded: list[str]) -> None:
    """A rank that is led to the store of another run never joins it; both jobs go on."""
    with served(run="one") as one, served(run="two") as two:
        seen = len(decoded)
        for store, run in ((one, "two"), (two, "one")):
            with (
                pytest.raises(CommTimeoutError, match=f"the store of run '{run}' did not answer"),
                joined(store.port, 1, run=run, timeout_s=SHORT_S),
            ):
                pass
        assert decoded[seen:] == []
        with joined(one.port, 1, run="one") as (a,), joined(two.port, 1, run="two") as (b,):
            a.set("mine", "one")
            b.set("mine", "two")
            assert (one.get("mine"), two.get("mine")) == (b"one", b"two")


@pytest.mark.guarantee("K4")
def test_a_wrong_secret_never_joins(decoded: list[str]) -> None:
    """The rank cannot even begin a handshake that the store understands."""
    with served() as first:
        seen = len(decoded)
        with (
            pytest.raises(CommTimeoutError, match="does not hold this job's secret") as caught,
            joined(first.port, 1, secret=OTHER, timeout_s=SHORT_S),
        ):
            pass
        assert caught.value.missing == (0,)
        assert decoded[seen:] == []


def test_the_refusals_are_logged_without_end_of_log(caplog: pytest.LogCaptureFixture) -> None:
    """The 1st, 2nd, 4th and 8th are, each with the rank of the key."""
    with served() as first:
        with dialled(first.port, keys_of_rank(SECRET, "run", 2)) as rogue:
            for _ in range(9):
                rogue.send(question(first, 1))
            server: Any = server_of(first)
            wait_until(lambda: server._refused == 9, "nine refusals")
        logged = [
            each.getMessage() for each in caplog.records if "refused a record of rank 2" in each.message
        ]
        assert len(logged) == 4
        with pytest.raises(UsageError, match="no free port"), served(port=first.port):
            pass
