"""The socket between the front end and a worker: JSON objects, one a line. Does not import torch."""

import json
import select
import socket
from collections.abc import Mapping
from typing import Any

__all__ = ["Wire"]


class Wire:
    """One end of the socket.

    Attributes:
        is_open: Whether the other end has not been closed, as far as `receive` has found.
    """

    def __init__(self, end: socket.socket) -> None:
        """Take over a connected stream socket.

        Args:
            end: The socket.
        """
        self._end = end
        self._rest = b""
        self.is_open = True

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._end.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one object.

        Raises:
            OSError: The other end is closed.
        """
        self._end.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, wait_s: float | None = 0.0) -> list[dict[str, Any]]:
        """Return the objects that have come; the end of the stream is none.

        Args:
            wait_s: How long to wait for the first one; None waits for it or for the end.
        """
        messages: list[dict[str, Any]] = []
        while self.is_open and select.select([self._end], [], [], 0.0 if messages else wait_s)[0]:
            try:
                read = self._end.recv(1 << 16)
            except ConnectionResetError:  # the other end was killed
                read = b""
            self.is_open = bool(read)
            *lines, self._rest = (self._rest + read).split(b"\n")
            messages += [json.loads(line) for line in lines]
            if not messages and wait_s is not None:
                break
        return messages

    def close(self) -> None:
        """Close this end. Idempotent."""
        self.is_open = False
        self._end.close()
