"""A relay between a client and a server over TCP, which records what passes and may change it."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Relay", "relay_to"]

Change = Callable[[bytes], bytes]


class Relay:
    """Passes bytes on in both directions.

    Attributes:
        port: Where it listens on 127.0.0.1.
        recorded: What clients have sent, by connection.
        to_server: Applied to each piece that a client sends; may be replaced at any time, and so the next.
        to_client: Applied to each piece that the server sends.
    """

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.recorded: list[bytearray] = []
        self.to_server: Change = bytes
        self.to_client: Change = bytes
        self._open: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        """End all connections."""
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()

    def _start(self, body: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=body, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
            except OSError:
                return
            self._open += [client, server]
            record = bytearray()
            self.recorded.append(record)

            def up(
                client: socket.socket = client, server: socket.socket = server, into: bytearray = record
            ) -> None:
                self._pass_on(client, server, lambda piece: self._recording(piece, into))

            def down(client: socket.socket = client, server: socket.socket = server) -> None:
                self._pass_on(server, client, self._changing)

            self._start(up)
            self._start(down)

    def _recording(self, piece: bytes, into: bytearray) -> bytes:
        into += piece
        return self.to_server(piece)

    def _changing(self, piece: bytes) -> bytes:
        return self.to_client(piece)

    def _pass_on(self, source: socket.socket, target: socket.socket, change: Change) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                target.sendall(change(piece))
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextmanager
def relay_to(server_port: int) -> Iterator[Relay]:
    """Yield a relay to a port of this host."""
    relay = Relay(server_port)
    try:
        yield relay
    finally:
        relay.close()
