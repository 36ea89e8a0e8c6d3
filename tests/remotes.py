"""Queues to remote readers over loopback, in one process or between processes, and a cable that can break."""

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from shm_broadcast.endpoint import RemoteKeys, RemoteSettings
from shm_broadcast.errors import CommTimeoutError
from shm_broadcast.handle import QueueHandle
from shm_broadcast.queue import QueueReader, QueueWriter
from shm_broadcast.settings import MIN_RING_BYTES, BroadcastSettings
from tests.queue_ranks import DEADLINE_S, Marks, blob, ended_with

__all__ = [
    "HERE",
    "MEGABYTE",
    "Cable",
    "counted",
    "over",
    "remote_queue",
    "share_queue",
    "slowly",
    "take_remote",
    "until_full",
]

HERE = "127.0.0.1"
MEGABYTE = 1 << 20


@contextmanager
def remote_queue(
    remote: Sequence[int] = (1,),
    local: Sequence[int] = (),
    writer: int = 0,
    warn_after_s: float = 60.0,
    ring_bytes: int = MIN_RING_BYTES,
    **remote_settings: Any,
) -> Iterator[tuple[QueueWriter, dict[int, QueueReader]]]:
    """Create a queue whose writer and readers are in this process; yield the writer, and the readers by rank."""
    keys = {rank: RemoteKeys.generate() for rank in remote}
    with ExitStack() as stack:
        end = stack.enter_context(
            QueueWriter.create(
                "steps",
                local,
                BroadcastSettings(ring_bytes=ring_bytes, warn_after_s=warn_after_s),
                writer=writer,
                remote_readers={rank: pair.public for rank, pair in keys.items()},
                bind_address=HERE,
                remote=RemoteSettings(**remote_settings),
            )
        )
        handle = end.handle.to_bytes(end.key)
        ends = {
            rank: stack.enter_context(
                QueueReader.open(handle, end.key, rank, DEADLINE_S, remote_keys=keys.get(rank))
            )
            for rank in [*local, *remote]
        }
        end.wait_until_ready(DEADLINE_S)
        yield end, ends


def share_queue(
    marks: Marks, remote: Sequence[int], local: Sequence[int] = (), address: str = HERE, **settings: Any
) -> QueueWriter:
    """Create a queue on rank 0 for readers in other processes, after they have sent their public keys."""
    made = QueueWriter.create(
        "steps",
        local,
        BroadcastSettings(ring_bytes=MEGABYTE),
        writer=0,
        remote_readers={rank: bytes.fromhex(marks.wait(f"public-{rank}")) for rank in remote},
        bind_address=address,
        remote=RemoteSettings(**settings),
    )
    marks.mark("queue-0", f"{made.handle.to_bytes(made.key).hex()} {made.key.hex()}")
    return made


def take_remote(marks: Marks, rank: int) -> QueueReader:
    """Send our public key, wait until the queue exists, and open the reader of `rank`."""
    keys = RemoteKeys.generate()
    marks.mark(f"public-{rank}", keys.public.hex())
    handle, key = map(bytes.fromhex, marks.wait("queue-0").split())
    return QueueReader.open(handle, key, rank, DEADLINE_S, remote_keys=keys)


def slowly(writer: QueueWriter, obj: Any) -> None:
    """Send an object, then pause for 10 ms."""
    writer.enqueue(obj)
    time.sleep(0.01)


def until_full(writer: QueueWriter, obj: Any, timeout_s: float = 0.3) -> tuple[int, CommTimeoutError]:
    """Send until there is no room; return how many were sent, and the error."""
    sent = 0
    while True:
        try:
            writer.enqueue(obj, timeout_s)
        except CommTimeoutError as error:
            return sent, error
        sent += 1


def counted(end: QueueReader, count: int) -> list[Any]:
    """Return the next `count` objects."""
    return [end.dequeue(DEADLINE_S) for _ in range(count)]


class Cable:
    """A proxy that forwards TCP connections to a port until it is cut or blocked. It is a context manager."""

    def __init__(self, port: int) -> None:
        """Listen, and forward connections to `port`."""
        self._target = (HERE, port)
        self._listener = socket.create_server((HERE, 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._lock = threading.Lock()
        self._is_open = self._is_through = True
        self.connections = 0
        self.carried = 0
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def _carry(self) -> None:
        while self._is_open:
            with self._lock:
                sockets = [self._listener, *(self._pairs if self._is_through else ())]
            # Not `select`, which refuses descriptors from 1,024 on: the process may have run thousands of tests.
            poller = select.poll()
            for each in sockets:
                poller.register(each, select.POLLIN)
            ready = {descriptor for descriptor, _ in poller.poll(5)}
            with self._lock:
                for each in [one for one in sockets if one.fileno() in ready]:
                    if each is self._listener:
                        self._join()
                    elif each in self._pairs:
                        self._pass_on(each)

    def _join(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(self._target)
        self._pairs[near], self._pairs[far] = far, near
        self.connections += 1

    def _pass_on(self, source: socket.socket) -> None:
        try:
            data = source.recv(1 << 16)
            if data:
                self._pairs[source].sendall(data)
        except OSError:
            data = b""
        self.carried += len(data)
        if not data:
            self._drop(source)

    def _drop(self, source: socket.socket) -> None:
        other = self._pairs.pop(source)
        del self._pairs[other]
        source.close()
        other.close()

    def cut(self) -> None:
        """Break every connection. New connections are forwarded again."""
        with self._lock:
            while self._pairs:
                self._drop(next(iter(self._pairs)))

    def block(self) -> None:
        """Stop forwarding. Neither side is told."""
        self._is_through = False

    def __enter__(self) -> Self:
        """Return the cable."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Remove the cable."""
        self._is_open = False
        self._thread.join()
        self.cut()
        self._listener.close()


def over(cable: Cable, handle: QueueHandle) -> QueueHandle:
    """Return the handle with the cable's port instead of its own."""
    assert handle.remote is not None
    return msgspec.structs.replace(handle, remote=msgspec.structs.replace(handle.remote, port=cable.port))


@contextmanager
def out_of_reach() -> Iterator[QueueWriter]:
    """Yield a writer whose only reader has two minutes, and from which nothing reaches that reader any more."""
    keys = RemoteKeys.generate()
    patient = RemoteSettings(lost_after_s=120.0)
    writer = QueueWriter.create("steps", remote_readers={1: keys.public}, bind_address=HERE, remote=patient)
    with (
        Cable(writer.handle.remote.port if writer.handle.remote else 0) as cable,
        QueueReader.open(over(cable, writer.handle), writer.key, 1, DEADLINE_S, remote_keys=keys),
    ):
        cable.block()
        writer.enqueue("lost")
        yield writer


def be_a_host(rank: int, directory: Path) -> None:
    """Be the writer, or the reader on another host, which is killed at the end."""
    marks = Marks(directory)
    Path(f"/dev/shm/host-{rank}").touch()
    if rank == 0:
        with share_queue(marks, remote=[1], address="10.78.0.1") as writer:
            writer.wait_until_ready(DEADLINE_S)
            for number in range(50):
                writer.enqueue({"number": number, "data": blob(number, number * 20_000)}, DEADLINE_S)
            marks.wait("read")
            marks.mark("sent")
            found = ended_with(partial(slowly, writer, None))
        marks.mark("writer", f"{found['kind']} {found['ranks']} {os.listdir('/dev/shm')}")
        return
    with take_remote(marks, rank) as end:
        for number in range(50):
            message = end.dequeue(DEADLINE_S)
            assert message["number"] == number
            assert np.array_equal(message["data"], blob(number, number * 20_000))
        marks.mark("read", str(os.listdir("/dev/shm")))
        marks.wait("sent")
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    be_a_host(int(sys.argv[2]), Path(sys.argv[1]))
