"""Export the metrics of a host's ranks: over HTTP for Prometheus, or in a file for node_exporter.

This runs in a process of its own, so it answers while all ranks hang or are stopped. It needs nothing of them.
"""

from __future__ import annotations

import io
import ipaddress
import os
import socket
import socketserver
import tempfile
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Final

from coordinator.diagnosis.metrics.exposition import CONTENT_TYPE, exposition
from coordinator.diagnosis.metrics.families import families_of
from coordinator.diagnosis.metrics.reader import MetricsReader, read_host
from shm_broadcast.errors import CommError, UsageError

__all__ = ["FILE_NAME", "MetricsServer", "listening_address", "write_metrics"]

FILE_NAME: Final = "group_coordinator.prom"
_MOST_CLIENTS: Final = 16
_MOST_HEAD_BYTES: Final = 8192
_HEAD_S: Final = 5.0
_ANSWER_S: Final = 10.0


def listening_address(text: str) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Return the family and the address of "HOST:PORT", with an IPv6 address in brackets.

    Raises:
        UsageError: There is no such address, or it means all interfaces: metrics tell what a host computes.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal() or int(port[:6]) > 65535:
        raise UsageError(f"{text!r} is not HOST:PORT, such as 127.0.0.1:9464 or [::1]:9464")
    host = host.removeprefix("[").removesuffix("]")
    wildcard = (
        f"metrics are not served on the wildcard address {text!r}, because any host could read them: name the address "
        "of one interface, such as 127.0.0.1:9464"
    )
    if not host:
        raise UsageError(wildcard)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"metrics cannot be served on {text!r}: {error}") from error
    ip = ipaddress.ip_address(str(address[0]))
    plain = getattr(ip, "ipv4_mapped", None) or ip
    if plain.is_unspecified:
        raise UsageError(wildcard)
    return family, address


class MetricsServer(socketserver.ThreadingTCPServer):
    """Answers GET /metrics, each client in a thread of its own.

    A client has 5 s to send at most 8 KiB and 10 s to take the answer, and there are at most 16; more are hung up on.
    """

    allow_reuse_address = True
    request_queue_size = (
        128  # with the default of 5, a client that comes with others tries again after a second
    )
    daemon_threads = True
    block_on_close = False

    def __init__(self, listen: str) -> None:
        """Listen on "HOST:PORT"; port 0 takes a free one. `serve_forever` answers.

        Raises:
            UsageError: As `listening_address`, or the address is not this host's, or the port is taken.
        """
        family, address = listening_address(listen)
        self.address_family: int = family
        self._reader = MetricsReader(read_host)
        self._room = threading.BoundedSemaphore(_MOST_CLIENTS)
        try:
            super().__init__(address, _Handler)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise UsageError(f"metrics cannot be served on {listen!r}: {reason}") from error

    @property
    def url(self) -> str:
        """Return where the metrics are."""
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}/metrics" if ":" in str(host) else f"http://{host!s}:{port}/metrics"

    def text(self) -> str:
        """Return the metrics as they are now."""
        return exposition(families_of(self._reader.read()))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a client in a thread of its own, or hang up if there is no room."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.release()  # no thread has begun
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a client, then make room for another."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()


class _Handler(BaseHTTPRequestHandler):
    """Answers one request, and closes the connection."""

    server: MetricsServer
    server_version = "group-coordinator"
    sys_version = ""
    request_version = "HTTP/1.0"
    command = ""
    requestline = ""

    def handle(self) -> None:
        try:
            self._answer()
        except (ConnectionError, TimeoutError):
            return  # the client has gone, or is too slow: it sees that the connection is closed

    def _answer(self) -> None:
        head = self._head()
        self.connection.settimeout(_ANSWER_S)  # for the whole answer
        if len(head) > _MOST_HEAD_BYTES:
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif head:
            self.rfile = io.BytesIO(head)
            self.handle_one_request()

    def _head(self) -> bytes:
        """Return the request up to its empty line, or a little more than the limit; empty if the client hangs up.

        Raises:
            TimeoutError: The time is over. A limit for each read would let a client send a byte now and then for ever.
        """
        head, deadline = b"", time.monotonic() + _HEAD_S
        while b"\r\n\r\n" not in head and b"\n\n" not in head and len(head) <= _MOST_HEAD_BYTES:
            self.connection.settimeout(max(deadline - time.monotonic(), 0.001))
            data = self.connection.recv(4096)
            if not data:
                return b""
            head += data
        return head

    def do_GET(self) -> None:
        """Answer GET."""
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND, explain="Only /metrics is served here.")
            return
        try:
            body = self.server.text().encode()
        except (CommError, OSError) as error:
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, explain=f"{type(error).__name__}: {error}")
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the parameter's name in http.server)
        """Write no line for each scrape."""


def write_metrics(directory: Path, reader: MetricsReader) -> Path:
    """Write the metrics into `directory` for node_exporter's textfile collector; return the file.

    It is replaced as a whole, so node_exporter never reads a part of it, and everybody may read it, as node_exporter
    runs as another user.

    Raises:
        OSError: The file cannot be written. One that was there stays as it was.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{FILE_NAME}.", dir=directory)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(exposition(families_of(reader.read())))
            os.fchmod(file.fileno(), 0o644)
        Path(name).replace(directory / FILE_NAME)
    except BaseException:
        # An interrupt may come once the file has its final name.
        Path(name).unlink(missing_ok=True)
        raise
    return directory / FILE_NAME
