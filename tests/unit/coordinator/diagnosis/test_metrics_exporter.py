"""The exporter answers GET /metrics on one interface, whatever its clients do, and writes whole files."""

import contextlib
import http.client
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.cli import main, metrics
from coordinator.diagnosis.metrics import exporter
from coordinator.diagnosis.metrics.exporter import FILE_NAME, MetricsServer, listening_address, write_metrics
from coordinator.diagnosis.metrics.reader import MetricsReader
from coordinator.diagnosis.pages import Search
from shm_broadcast.errors import UsageError
from tests.waiting import wait_until


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    with MetricsServer("127.0.0.1:0") as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def port_of(server: MetricsServer) -> int:
    return int(server.server_address[1])


def ask(server: MetricsServer, path: str = "/metrics", method: str = "GET") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=10)
    connection.request(method, path)
    answer = connection.getresponse()
    answer.read_all = answer.read()  # type: ignore[attr-defined]
    connection.close()
    return answer


def all_of(sock: socket.socket) -> bytes:
    """What the server sends until it closes the connection, also if it has not read all that the client sent."""
    sock.settimeout(20)
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(65536):
            parts.append(data)
    return b"".join(parts)


@pytest.mark.parametrize(
    "listen",
    [
        *("0.0.0.0:9464", ":9464", "[::]:9464", ":::9464", "0:9464", "0x0:9464", "[]:9464"),
        "[::ffff:0.0.0.0]:9464",
    ],
)
def test_a_wildcard_address_is_refused(listen: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In each spelling of it: any host could read what this one does."""
    with pytest.raises(UsageError, match="wildcard"):
        listening_address(listen)
    assert main(["metrics", "--listen", listen]) == 2
    assert "127.0.0.1:9464" in capsys.readouterr().err


@pytest.mark.parametrize(
    "listen", ["127.0.0.1", "127.0.0.1:http", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:", ""]
)
def test_an_address_without_a_port_is_refused(listen: str) -> None:
    """The error shows the form."""
    with pytest.raises(UsageError, match=r"HOST:PORT"):
        listening_address(listen)


def test_an_address_of_another_host_and_a_taken_port_are_refused(server: MetricsServer) -> None:
    """The error names the address and the reason."""
    with pytest.raises(UsageError, match=r"192\.0\.2\.1:0.*Cannot assign"):
        MetricsServer("192.0.2.1:0")
    with pytest.raises(UsageError, match="already in use"):
        MetricsServer(f"127.0.0.1:{port_of(server)}")


def test_an_ipv6_address_is_listened_on() -> None:
    """In brackets, as in a URL."""
    family, address = listening_address("[::1]:9464")
    assert family is socket.AF_INET6
    assert address[:2] == ("::1", 9464)


def test_metrics_are_served_as_prometheus_wants_them(server: MetricsServer) -> None:
    """With the type and version of the text format; a query, such as Prometheus's parameters, changes nothing."""
    for path in ("/metrics", "/metrics?collect=all"):
        answer = ask(server, path)
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert b"\ngroup_coordinator_build_info{version=" in answer.read_all  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *(("GET", path, 404) for path in ("/", "/metrics/", "/../etc/passwd", "/metricsx", "*")),
        *((method, "/metrics", 501) for method in ("POST", "PUT", "DELETE", "HEAD")),
    ],
)
def test_nothing_else_is_served(server: MetricsServer, method: str, path: str, status: int) -> None:
    """One path and one method."""
    assert ask(server, path, method).status == status


def test_a_failing_look_is_an_answer_too(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prometheus then shows the target as down, and the answer says why."""

    def fail() -> str:
        raise PermissionError(13, "Permission denied", "/proc")

    monkeypatch.setattr(server, "text", fail)
    answer = ask(server)
    assert answer.status == 500
    assert b"PermissionError" in answer.read_all  # type: ignore[attr-defined]


def test_a_request_that_is_too_long_is_refused(server: MetricsServer) -> None:
    """What comes before the end of the request is kept, so it is bounded."""
    with socket.create_connection(("127.0.0.1", port_of(server))) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * exporter._MOST_HEAD_BYTES)
        assert all_of(client).startswith(b"HTTP/1.0 431 ")


def wait_for_room(server: MetricsServer) -> None:
    """Wait until the threads of all clients have ended."""
    wait_until(lambda: server._room._value == exporter._MOST_CLIENTS, "room for all clients")


@pytest.mark.slow
def test_silent_and_slow_clients_do_not_block_others(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that sends nothing and one that sends a byte now and then are hung up on; others are answered meanwhile."""
    monkeypatch.setattr(exporter, "_HEAD_S", 1.5)
    begin = time.monotonic()
    silent, dripping = (socket.create_connection(("127.0.0.1", port_of(server))) for _ in range(2))
    with silent, dripping:
        wait_until(lambda: server._room._value == exporter._MOST_CLIENTS - 2, "both clients")
        while server._room._value < exporter._MOST_CLIENTS:
            with contextlib.suppress(ConnectionError):
                dripping.sendall(b"G")
            assert ask(server).status == 200
            time.sleep(0.1)
        assert all_of(silent) == b""
        assert all_of(dripping) == b""
    assert time.monotonic() - begin >= 1.5


@pytest.mark.slow
def test_a_client_that_does_not_read_does_not_block_others(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is larger than what the kernel keeps for it. The client gets a part of it."""
    text = "x\n" * 10_000_000
    monkeypatch.setattr(server, "text", lambda: text)
    monkeypatch.setattr(exporter, "_ANSWER_S", 1.0)
    with socket.create_connection(("127.0.0.1", port_of(server))) as deaf:
        deaf.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert len(ask(server).read_all) == len(text)  # type: ignore[attr-defined]
        wait_for_room(server)
        part = all_of(deaf)
    assert part.startswith(b"HTTP/1.0 200 ")
    assert len(part) < len(text)


def test_more_clients_than_there_is_room_for_are_hung_up_on(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes a thread. When the others have gone there is room again."""
    monkeypatch.setattr(exporter, "_HEAD_S", 60.0)
    address = ("127.0.0.1", port_of(server))
    with contextlib.ExitStack() as stack:
        *clients, one_more = [
            stack.enter_context(socket.create_connection(address)) for _ in range(exporter._MOST_CLIENTS + 1)
        ]
        assert all_of(one_more) == b""
        assert select.select(clients, [], [], 0)[0] == []  # the others are still there
    wait_for_room(server)
    assert ask(server).status == 200


def test_a_client_for_whom_no_thread_begins_takes_no_room(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that has no room for a thread now may have some later."""

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch, socket.socket() as client:
        patch.setattr(threading.Thread, "start", fail)
        for _ in range(exporter._MOST_CLIENTS + 1):
            with pytest.raises(RuntimeError):
                server.process_request(client, None)
    assert ask(server).status == 200


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """node_exporter, which is another user, reads files whose names end with .prom, and sees the old or the new one."""
    reader = MetricsReader(lambda: Search((), (), {}))
    file = write_metrics(tmp_path, reader)
    first = file.stat()
    assert file.name == "group_coordinator.prom"
    assert first.st_mode & 0o777 == 0o644
    assert file.read_text().endswith("\n")
    with file.open() as held:
        assert write_metrics(tmp_path, reader) == file
        assert held.read() == file.read_text()
        assert os.fstat(held.fileno()).st_ino != file.stat().st_ino
    assert os.listdir(tmp_path) == [file.name]


def test_a_file_that_cannot_be_written_leaves_the_last_one(tmp_path: Path) -> None:
    """A look that fails leaves nothing half written behind."""
    file = write_metrics(tmp_path, MetricsReader(lambda: Search((), (), {})))
    before = file.read_bytes()

    def fail() -> Search:
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        write_metrics(tmp_path, MetricsReader(fail))
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == [file.name]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle_of_a_file_ends_the_exporter_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    """It is no error, wherever it strikes, and neither the file nor a part of it is left."""
    written: list[Path] = []

    def write(directory: Path, reader: MetricsReader) -> Path:
        if written:
            os.kill(os.getpid(), number)
        written.append(write_metrics(directory, reader))
        return written[-1]

    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(metrics, "write_metrics", write)
    assert main(["metrics", "--textfile", str(tmp_path), "--interval", "0.01"]) == 0
    assert len(written) == 2
    assert os.listdir(tmp_path) == []
    assert capsys.readouterr().err == ""
    assert {each: signal.getsignal(each) for each in before} == before


def test_an_interrupt_behind_the_last_step_of_a_file_arrives_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has its final name then, and the temporary one is gone."""
    replace = Path.replace

    def interrupted(self: Path, target: Path) -> None:
        replace(self, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_metrics(tmp_path, MetricsReader(lambda: Search((), (), {})))
    assert os.listdir(tmp_path) == [FILE_NAME]


def test_a_directory_that_is_not_there_is_a_wrong_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not made: node_exporter would not look there."""
    assert main(["metrics", "--textfile", str(tmp_path / "none")]) == 2
    assert "is not a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["--listen", "127.0.0.1:0", "--textfile", "."], ["--textfile", ".", "--interval", "0"]]
)
def test_a_wrong_command_line_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Either an address or a directory, and a positive interval."""
    with pytest.raises(SystemExit) as ended:
        main(["metrics", *arguments])
    assert ended.value.code == 2
    assert capsys.readouterr().err
