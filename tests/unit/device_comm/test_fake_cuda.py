"""The tests' driver finds errors that a device may forgive, and runs the product's kernels."""

import os
import signal
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from device_comm.cuda.driver import PreparedLaunch
from shm_broadcast.errors import ClosedError, CudaError, UsageError
from tests.fake_cuda import FakeDriver, FakeFaults, fake_cubin, violations
from tests.probes import requires


def in_a_child(call: Callable[[], object]) -> int:
    """Run `call` in another process and return how it ended."""
    child = os.fork()
    if child == 0:
        try:
            call()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_memory_that_is_freed_while_a_peer_has_it_open_is_convicted(tmp_path: Path) -> None:
    """Freeing memory that a live peer has open is an error; a dead peer does not count."""
    owner = FakeDriver(tmp_path, 0)
    address = owner.mem_alloc(4096)
    handle = owner.ipc_get_handle(address)
    assert in_a_child(lambda: FakeDriver(tmp_path, 1).ipc_open_handle(handle)) == 0
    owner.mem_free(address)
    assert violations(tmp_path) == []
    address = owner.mem_alloc(4096)
    handle = owner.ipc_get_handle(address)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        FakeDriver(tmp_path, 1).ipc_open_handle(handle)
        os.write(write, b"x")
        signal.pause()
    os.read(read, 1)
    owner.mem_free(address)
    os.kill(child, 9)
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    (text,) = violations(tmp_path)
    assert "rank 0: freed memory-0-" in text
    assert "-by-1" in text


def test_a_handle_is_opened_once_and_not_at_home(tmp_path: Path) -> None:
    """A handle opened twice, by its own process, or after its memory was freed is an error."""
    owner = FakeDriver(tmp_path, 0)
    address = owner.mem_alloc(64)
    handle = owner.ipc_get_handle(address)
    with pytest.raises(CudaError, match="INVALID_CONTEXT"):
        owner.ipc_open_handle(handle)

    def twice() -> None:
        peer = FakeDriver(tmp_path, 1)
        peer.memset_d32(peer.ipc_open_handle(handle), 5, 16, 0)
        with pytest.raises(CudaError, match="ALREADY_MAPPED"):
            peer.ipc_open_handle(handle)

    assert in_a_child(twice) == 0
    assert owner.memcpy_dtoh(address, 64) == b"\5\0\0\0" * 16
    assert "opened memory-0-" in violations(tmp_path)[0]
    owner.mem_free(address)

    def late() -> None:
        with pytest.raises(CudaError, match="was freed"):
            FakeDriver(tmp_path, 1).ipc_open_handle(handle)

    assert in_a_child(late) == 0
    for wrong in (b"", bytes(64), handle[:-1]):
        with pytest.raises(CudaError, match="INVALID_VALUE"):
            owner.ipc_open_handle(wrong)


def test_an_export_that_was_not_asked_about_is_convicted(tmp_path: Path) -> None:
    """Exporting an expandable segment without asking whether that is possible is an error."""
    driver = FakeDriver(tmp_path, 0, faults=FakeFaults(expandable_segments=True))
    tensor = driver.tensor((4, 4), torch.float16, padding_bytes=32)
    assert not driver.is_legacy_ipc_capable(tensor.data_ptr())
    assert driver.address_range(tensor.data_ptr()) == (tensor.data_ptr() - 32, 64)
    assert violations(tmp_path) == []
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        driver.ipc_get_handle(tensor.data_ptr())
    assert "cannot be exported" in violations(tmp_path)[0]
    with pytest.raises(CudaError, match="NOT_FOUND"):
        driver.address_range(torch.zeros(4).data_ptr())
    driver.release()


def test_what_is_not_given_back_is_listed(tmp_path: Path) -> None:
    """Everything that was not released is listed: memory, mappings, handles, modules, streams, events."""
    driver = FakeDriver(tmp_path, 0, kernels={"empty": None})
    memory = driver.mem_alloc(4096)
    host, device = driver.host_alloc_mapped(64)
    assert host == device
    handle = driver.vmm_create(driver.vmm_granularity())
    address = driver.vmm_map(handle, driver.vmm_granularity())
    module = driver.module_load(b"")
    stream, event = driver.stream_create(), driver.event_create()
    assert len(driver.leaks()) == 7
    driver.vmm_unmap(address, driver.vmm_granularity())
    driver.vmm_release(handle)
    driver.mem_free(memory)
    driver.host_free(host)
    driver.module_unload(module)
    driver.stream_destroy(stream)
    driver.event_destroy(event)
    assert driver.leaks() == []
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        driver.mem_free(memory)
    driver.close()
    with pytest.raises(ClosedError):
        driver.mem_alloc(1)


def test_a_call_fails_when_it_is_told_to(tmp_path: Path) -> None:
    """The n-th call of a method fails on request, and allocation fails beyond the device's memory."""
    driver = FakeDriver(tmp_path, 0, faults=FakeFaults(fail={"mem_alloc": (2, 999)}, memory_bytes=100))
    address = driver.mem_alloc(60)
    with pytest.raises(CudaError) as raised:
        driver.mem_alloc(10)
    assert (raised.value.code, raised.value.function, raised.value.library) == (999, "mem_alloc", "fake CUDA")
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        driver.mem_alloc(60)
    driver.mem_free(address)


def test_capture_records_launches_with_their_arguments_of_then(tmp_path: Path) -> None:
    """A capture runs nothing, refuses forbidden calls, and a replay uses the recorded arguments."""
    seen: list[tuple[int, int, int]] = []

    def kernel(grid: int, block: int, arguments: PreparedLaunch) -> None:
        seen.append((grid, block, arguments.words[arguments.word_of[1]]))

    driver = FakeDriver(tmp_path, 0, kernels={"kernel": kernel})
    module = driver.module_load(b"any")
    function = driver.module_function(module, "kernel")
    arguments = PreparedLaunch([b"abc", (5).to_bytes(8, "little")])
    memory = driver.mem_alloc(64)
    driver.launch(function, 1, 32, 0, arguments)
    driver.begin_capture(7)
    assert driver.stream_is_capturing(7)
    assert not driver.stream_is_capturing(0)
    driver.launch(function, 2, 64, 7, arguments)
    driver.memset_d32(memory, 9, 16, 7)
    arguments.words[arguments.word_of[1]] = 6
    for forbidden in (
        lambda: driver.mem_alloc(1),
        driver.context_synchronize,
        lambda: driver.stream_synchronize(0),
    ):
        with pytest.raises(CudaError, match="CAPTURE_UNSUPPORTED"):
            forbidden()
    graph = driver.end_capture(7)
    assert seen == [(1, 32, 5)]
    assert driver.memcpy_dtoh(memory, 4) == bytes(4)
    driver.replay(graph)
    driver.replay(graph)
    assert seen == [(1, 32, 5), (2, 64, 5), (2, 64, 5)]
    assert graph.launches == ["kernel"]
    assert driver.memcpy_dtoh(memory, 4) == b"\t\0\0\0"
    driver.module_unload(module)
    with pytest.raises(CudaError, match="INVALID_HANDLE"):
        driver.launch(function, 1, 1, 0, arguments)
    driver.mem_free(memory)


def test_arguments_lie_where_the_driver_looks() -> None:
    """Each argument is 8-byte aligned and kept unchanged, and one word can be rewritten."""
    prepared = PreparedLaunch([b"x" * 20, struct.pack("<f", 1.5), (7).to_bytes(8, "little")])
    assert prepared.word_of == (0, 3, 4)
    prepared.words[prepared.word_of[2]] = 1 << 63
    assert bytes(prepared.words[:3]).startswith(b"x" * 20)
    assert struct.unpack("<f", bytes(prepared.words[3:4])[:4]) == (1.5,)
    assert bytes(prepared.words[4:]) == (1 << 63).to_bytes(8, "little")
    with pytest.raises(UsageError):
        PreparedLaunch([b""])


LIBRARY = """
#include <string.h>
int launch_clusters(const char *kernel, unsigned grid, unsigned block, unsigned cluster, void **arguments) {
    if (strcmp(kernel, "store")) return 1;
    **(unsigned **)arguments[0] = *(unsigned *)arguments[1] + 10000 * cluster + 1000 * grid + block;
    return 0;
}
"""


@requires("compiler")
def test_kernels_come_from_a_host_library(tmp_path: Path) -> None:
    """A module names a shared library, and a launch passes pointers to the arguments."""
    (tmp_path / "kernels.c").write_text(LIBRARY)
    library = tmp_path / "kernels.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "kernels.c"], check=True)
    plain = FakeDriver(tmp_path, 0)
    found = FakeDriver(tmp_path, 1, library_of=lambda cubin: tmp_path / cubin.decode())
    for driver, cubin in ((plain, fake_cubin(library)), (found, b"kernels.so")):
        module = driver.module_load(cubin)
        memory = driver.mem_alloc(64)
        arguments = PreparedLaunch([memory.to_bytes(8, "little"), (5).to_bytes(4, "little")])
        driver.launch(driver.module_function(module, "store"), 3, 64, 0, arguments)
        assert driver.memcpy_dtoh(memory, 4) == (13069).to_bytes(4, "little")
        configured = driver.configure(driver.module_function(module, "store"), 4, 64, cluster=2)
        driver.launch_configured(configured, 0, arguments)
        assert driver.memcpy_dtoh(memory, 4) == (24069).to_bytes(4, "little")
        with pytest.raises(CudaError, match="no_such_kernel returned 1"):
            driver.launch(driver.module_function(module, "no_such_kernel"), 1, 32, 0, arguments)
        driver.mem_free(memory)
        driver.module_unload(module)
        assert driver.leaks() == []
