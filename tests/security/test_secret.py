"""The secret of a job: what is accepted as one, what follows from it, and where it does not appear."""

import contextlib
import copy
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from coordinator.security import secret as secrets_read
from coordinator.security.hkdf import expand, extract
from coordinator.security.keys import keys_of_rank, keys_of_store, public_keys
from coordinator.security.secret import LEAST_BYTES, MOST_BYTES, Secret, from_descriptor, from_file
from shm_broadcast import codec
from shm_broadcast.errors import CapabilityError, UsageError
from shm_broadcast.threads import DaemonThread
from tests.handlers import Interrupt, alarm_in, raising_at
from tests.leaks import Snapshot, leaked_since
from tests.waiting import wait_until

VALUE = bytes(range(100, 100 + LEAST_BYTES))
# A part of the value that no text may show, in any of these forms.
FORMS = [VALUE[4:12], VALUE[4:12].hex().encode(), repr(VALUE[4:12])[2:-1].encode()]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin each test without a descriptor that was read."""
    monkeypatch.setattr(secrets_read, "_taken", {})


def shows(text: object) -> bool:
    return any(form in str(text).encode() for form in FORMS)


def write(path: Path, content: bytes = VALUE, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


@contextlib.contextmanager
def pipe_with(content: bytes) -> Iterator[int]:
    """Yield the reading end of a pipe that holds `content`, whose other end is closed."""
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    try:
        yield reading
    finally:
        with contextlib.suppress(OSError):
            os.close(reading)


# --- HKDF -----------------------------------------------------------------------------------------------------

# Appendix A of RFC 5869: input, salt, info, what is extracted, what is expanded.
VECTORS = [
    (
        "0b" * 22,
        "000102030405060708090a0b0c",
        "f0f1f2f3f4f5f6f7f8f9",
        "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5",
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
    ),
    (
        bytes(range(0x50)).hex(),
        bytes(range(0x60, 0xB0)).hex(),
        bytes(range(0xB0, 0x100)).hex(),
        "06a6b88c5853361a06104c9ceb35b45cef760014904671014a193f40c15fc244",
        (
            "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
            "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87"
        ),
    ),
    (
        "0b" * 22,
        "",
        "",
        "19ef24a32c717b167f33a91d6f648bdf96596776afdb6377ac434c1c293ccb04",
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
    ),
]


@pytest.mark.guarantee("K2")
@pytest.mark.parametrize("vector", VECTORS)
def test_hkdf_gives_the_values_of_the_rfc(vector: tuple[str, ...]) -> None:
    """Both steps have the results of RFC 5869, appendix A.1 to A.3."""
    material, salt, info, extracted, expanded = map(bytes.fromhex, vector)
    assert extract(salt, material) == extracted
    assert expand(extracted, info, len(expanded)) == expanded


@pytest.mark.parametrize("length", [0, -1, 255 * 32 + 1])
def test_hkdf_refuses_a_length_that_it_cannot_give(length: int) -> None:
    """RFC 5869 allows at most 255 blocks."""
    with pytest.raises(ValueError, match="HKDF gives 1 to 8160 bytes"):
        expand(bytes(32), b"", length)


# --- derived keys ---------------------------------------------------------------------------------------------


@pytest.mark.guarantee("K2")
def test_each_role_run_and_rank_has_keys_of_its_own() -> None:
    """Neither another rank, run, role or secret has the same pair, nor one whose parts only join to the same text."""
    one, other = Secret(VALUE), Secret(VALUE + b"x")
    pairs = [
        keys_of_store(one, "run"),
        keys_of_store(one, "run 1"),
        keys_of_store(other, "run"),
        *(keys_of_rank(each, run, rank) for each in (one, other) for run in ("r", "r1") for rank in (1, 11)),
        keys_of_rank(one, "r1", 0),
    ]
    assert len({pair.public for pair in pairs}) == len(pairs)
    assert len({pair.secret() for pair in pairs}) == len(pairs)
    assert one.derive("a", "bc", 1) != one.derive("ab", "c", 1)
    assert one.derive("a", "b1", 1) != one.derive("a", "b", 11)


@pytest.mark.guarantee("K2")
def test_two_processes_with_one_secret_derive_the_same_keys() -> None:
    """The keys depend on nothing but the secret, the role, the run and the rank, and form a pair of CURVE."""
    pair = keys_of_rank(Secret(VALUE), "run", 7)
    assert pair.public == keys_of_rank(Secret(VALUE), "run", 7).public
    assert zmq.curve_public(z85.encode(pair.secret())) == z85.encode(pair.public)
    assert public_keys(Secret(VALUE), "run", 9)[pair.public] == 7


# --- what is accepted -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [LEAST_BYTES, MOST_BYTES])
def test_a_private_file_is_read_as_it_is(tmp_path: Path, size: int) -> None:
    """Every byte counts, a line's end too, and a symbolic link to a private file is followed."""
    content = bytes(number % 251 for number in range(size - 1)) + b"\n"
    path = write(tmp_path / "secret", content)
    (tmp_path / "link").symlink_to(path)
    for name in (path, tmp_path / "link"):
        assert from_file(str(name)).derive("rank", "r", 0) == Secret(content).derive("rank", "r", 0)


REFUSED_MODES = [0o640, 0o604, 0o620, 0o602, 0o660, 0o644, 0o601]


@pytest.mark.guarantee("K1")
@pytest.mark.parametrize("mode", REFUSED_MODES)
@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_that_others_can_access_is_refused(tmp_path: Path, mode: int, is_link: bool) -> None:
    """Neither the group nor others may have any right to it, also where a private-looking link points to it."""
    path = write(tmp_path / "secret", mode=mode)
    if is_link:
        path = tmp_path / "link"
        path.symlink_to("secret")
    with pytest.raises(UsageError, match=f"mode {mode:04o}.*chmod 600") as caught:
        from_file(str(path))
    assert not shows(caught.value)


WRONG_CONTENT = {
    "fewer": VALUE[:-1],
    "more": VALUE * 129,
    "not random": VALUE[:7] * 10,
}


@pytest.mark.guarantee("K1")
@pytest.mark.parametrize("why", WRONG_CONTENT)
def test_what_is_no_secret_is_refused_without_a_word_of_it(tmp_path: Path, why: str) -> None:
    """Whether it comes in a file or through a descriptor, the text names the place and the reason only."""
    content = WRONG_CONTENT[why]
    with pytest.raises(UsageError, match=why) as of_file:
        from_file(str(write(tmp_path / "secret", content)))
    with pipe_with(content[: MOST_BYTES + 1]) as reading, pytest.raises(UsageError, match=why) as of_pipe:
        from_descriptor(reading)
    assert not shows(of_file.value)
    assert not shows(of_pipe.value)
    assert of_file.value.__cause__ is of_pipe.value.__cause__ is None


def a_directory(path: Path) -> None:
    path.mkdir()


def nothing(path: Path) -> None:
    """Leave the path unused."""


def a_pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


def a_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/urandom")


def a_circle(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.guarantee("K1")
@pytest.mark.parametrize("make", [a_directory, nothing, a_pipe, a_link_to_a_device, a_circle])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """A pipe that nobody writes into does not keep the caller waiting either."""
    make(tmp_path / "secret")
    with pytest.raises(UsageError, match="is not a regular file|cannot be read"):
        from_file(str(tmp_path / "secret"))


@pytest.mark.guarantee("K1")
def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user could have written it, or read it before."""
    path = write(tmp_path / "secret")
    real = os.fstat

    def foreign(descriptor: int) -> os.stat_result:
        status = real(descriptor)
        return os.stat_result((*status[:4], 4242, *status[5:10]))

    monkeypatch.setattr(os, "fstat", foreign)
    with pytest.raises(UsageError, match="belongs to user 4242"):
        from_file(str(path))


def test_a_descriptor_is_read_once_and_closed() -> None:
    """A process that joins a second world uses what it has read; a program that it starts inherits nothing."""
    with pipe_with(VALUE) as reading:
        os.set_inheritable(reading, True)
        first = from_descriptor(reading)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(reading)
        assert from_descriptor(reading) is first
        assert first.derive("rank", "r", 1) == Secret(VALUE).derive("rank", "r", 1)


def test_a_memory_file_passes_a_secret_on() -> None:
    """It has no name, so its mode lets nobody open it."""
    descriptor = os.memfd_create("secret")
    os.write(descriptor, VALUE)
    os.lseek(descriptor, 0, os.SEEK_SET)
    assert from_descriptor(descriptor).derive("rank", "r", 1) == Secret(VALUE).derive("rank", "r", 1)


@pytest.mark.guarantee("K1")
def test_a_descriptor_of_another_kind_is_refused(tmp_path: Path) -> None:
    """A readable file behind the descriptor counts as that file; what is closed, or is a device, is refused."""
    path = write(tmp_path / "secret", mode=0o644)
    for name, reason in ((str(path), "mode 0644"), ("/dev/zero", "neither a pipe nor a regular file")):
        descriptor = os.open(name, os.O_RDONLY)
        with pytest.raises(UsageError, match=reason):
            from_descriptor(descriptor)
        os.close(descriptor)
    with pytest.raises(UsageError, match="is not open"):
        from_descriptor(1 << 19)


def test_a_pipe_that_is_never_closed_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for the writer's end has a deadline of its own."""
    monkeypatch.setattr(secrets_read, "_WRITING_S", 0.05)
    reading, writing = os.pipe()
    os.write(writing, VALUE)
    with pytest.raises(UsageError, match="has not closed its end"):
        from_descriptor(reading)
    os.close(writing)


def test_a_signal_handler_opens_the_secret_that_is_being_read() -> None:
    """It strikes while the same thread waits for the writer, and writes itself: both get the secret."""
    reading, writing = os.pipe()
    by_handler: list[Secret] = []

    def handler() -> None:
        os.write(writing, VALUE)
        os.close(writing)
        by_handler.append(from_descriptor(reading))

    with alarm_in("from_descriptor", handler):
        assert [from_descriptor(reading)] == by_handler


def test_an_interrupted_reader_loses_nothing() -> None:
    """What a handler raises ends the call, and the next one gets the secret."""
    reading, writing = os.pipe()

    def handler() -> None:
        raise Interrupt

    with alarm_in("from_descriptor", handler), pytest.raises(Interrupt):
        from_descriptor(reading)
    os.write(writing, VALUE)
    os.close(writing)
    assert from_descriptor(reading).derive("rank", "r", 1) == Secret(VALUE).derive("rank", "r", 1)


def test_a_reader_that_is_interrupted_anywhere_leaves_no_descriptor(tmp_path: Path) -> None:
    """At every place where Python runs a handler."""
    path, before = str(write(tmp_path / "secret")), Snapshot.take()
    step = 0
    while raising_at(step, lambda: from_file(path), ("/security/secret.py",)):
        step += 1
    assert step > 0
    assert leaked_since(before) == []


def test_a_forked_child_reads_a_secret_though_its_parent_was_reading_one() -> None:
    """The thread that reads there is missing in the child."""
    parents, writing = os.pipe()
    thread = threading.Thread(target=lambda: from_descriptor(parents))
    thread.start()
    wait_until(secrets_read._lock.locked, "the parent to read")
    with pipe_with(VALUE) as reading, warnings.catch_warnings():
        # Newer Pythons warn when a process with threads forks, which is the case under test.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            os.close(writing)
            os._exit(from_descriptor(reading).derive("r", "r", 1) != Secret(VALUE).derive("r", "r", 1))
    os.write(writing, VALUE)
    os.close(writing)
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_process_that_can_have_no_thread_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The secret is read on one, and could be read on the next try."""
    path = str(write(tmp_path / "secret"))

    def start(_thread: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(DaemonThread, "start", start)
        with pytest.raises(CapabilityError, match="no thread could be started to read the secret"):
            from_file(path)
    assert from_file(path).derive("r", "r", 1) == Secret(VALUE).derive("r", "r", 1)


# --- where it does not appear ---------------------------------------------------------------------------------


@pytest.mark.guarantee("K3")
def test_a_secret_can_be_neither_shown_nor_copied() -> None:
    """Its texts and those of its keys are free of it, and no serialiser takes it."""
    secret = Secret(VALUE)
    pair = keys_of_rank(secret, "run", 0)
    for text in (repr(secret), f"{secret}", repr([secret]), repr(pair), f"{pair}"):
        assert not shows(text)
        assert pair.secret().hex()[:16] not in text
    refusals: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy, codec.encode]
    for call in refusals:
        with pytest.raises(UsageError):
            call(secret)
    assert not hasattr(secret, "__dict__")


@pytest.mark.guarantee("K3")
def test_threads_that_read_one_descriptor_get_one_secret() -> None:
    """The second one does not find it closed."""
    found: list[Secret] = []
    with pipe_with(VALUE) as reading:
        threads = [threading.Thread(target=lambda: found.append(from_descriptor(reading))) for _ in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
