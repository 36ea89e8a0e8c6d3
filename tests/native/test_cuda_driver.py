"""Test `CudaDriver` through NVIDIA's own bindings, over a libcuda that only records how it was called."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.probes import requires

pytestmark = requires("compiler")

HERE = Path(__file__).parent

# The bindings load one libcuda per process. Each case therefore runs in a new interpreter, without torch.
PRELUDE = """
import ctypes, json, sys
library = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
from device_comm.cuda.driver_bindings import CudaDriver, PreparedLaunch
from shm_broadcast.errors import CommError
def outcome(call):
    try:
        return call()
    except CommError as error:
        fields = {key: value for key, value in vars(error).items()}
        return [type(error).__name__, str(error), fields]
"""

EVERYTHING = """
driver = CudaDriver(1)
facts = [driver.driver_version(), driver.device_count(), driver.device_index(), driver.device_name(),
         driver.compute_capability(), driver.multiprocessors(), driver.total_memory(), driver.uuid(),
         driver.device_uuids(), driver.pci_bus_id(), driver.ipc_supported(), driver.vmm_supported(),
         driver.can_access_peer(0), driver.can_access_peer(1), driver.native_atomics(0), driver.native_atomics(1)]
driver.enable_peer_access(0)
memory = driver.mem_alloc(64)
driver.memset_d32(memory, 0xFFFFFFFF, 2, 0)
own = driver.stream_create()
driver.stream_synchronize(own)
words = driver.memcpy_dtoh(memory, 8, own).hex()
driver.memcpy_htod(memory + 8, b"abcd", own)
driver.stream_destroy(own)
driver.memcpy_dtod(memory + 12, memory + 8, 4, 9)
seen = driver.memcpy_dtoh(memory, 20).hex()
assert words == seen[:16]
driver.mem_free(memory)
host, device = driver.host_alloc_mapped(16)
zeroed = ctypes.string_at(host, 16).hex()
driver.host_free(host)
ranges = driver.address_range(116)
capable = driver.is_legacy_ipc_capable(116)
handle = driver.ipc_get_handle(100)
opened = driver.ipc_open_handle(handle)
driver.ipc_close(opened)
short = outcome(lambda: driver.ipc_open_handle(b"x"))[0]
granule = driver.vmm_granularity()
made = driver.vmm_create(granule)
exported = driver.vmm_export(made)
imported = driver.vmm_import(exported)
mapped = driver.vmm_map(imported, granule)
driver.vmm_unmap(mapped, granule)
assert driver.multicast_supported()
unit = driver.multicast_granularity(4, 100)
team = driver.multicast_create(4, unit)
driver.multicast_add_device(team)
driver.multicast_bind(team, made, unit)
driver.multicast_unbind(team, unit)
driver.vmm_release(team)
driver.vmm_release(made)
module = driver.module_load(b"cubin")
function = driver.module_function(module, "push")
arguments = PreparedLaunch([(1 << 40).to_bytes(8, "little"), (7).to_bytes(4, "little")])
stream = 700
driver.launch(function, 32, 256, stream, arguments)
arguments.words[arguments.word_of[1]] = 8
driver.launch(function, 33, 256, 0, arguments)
plain = driver.configure(function, 34, 128)
driver.launch_configured(plain, stream, arguments)
driver.launch_configured(plain, 9, arguments)
full = driver.configure(function, 36, 256, cluster=4, is_dependent=True)
driver.launch_configured(full, 9, arguments)
streams = (stream, 2, 702, 703, 0, 1)
captures = [[driver.stream_is_capturing(each), driver.capture_id(each)] for each in streams]
event = driver.event_create()
driver.event_record(event, stream)
driver.stream_wait_event(0, event)
done = driver.event_query(event)
driver.event_destroy(event)
driver.context_synchronize()
driver.relax_capture()
driver.module_unload(module)
unloaded = outcome(lambda: driver.launch(function, 1, 1, 0, arguments))[0]
assert outcome(lambda: driver.configure(function, 1, 1))[0] == unloaded
driver.close()
driver.close()
closed = outcome(lambda: driver.mem_alloc(1))[0]
print(json.dumps([facts, seen, host == device, zeroed, ranges, capable, list(handle), opened, short, exported,
                  imported, mapped, captures, done, unloaded, closed, library.stub_depth()]))
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the stub of libcuda and return its path."""
    library = tmp_path_factory.mktemp("libcuda") / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
    subprocess.run([*command, str(HERE / "libcuda_stub.c"), "-ldl"], check=True)
    return library


@pytest.fixture
def run(stub: Path, tmp_path: Path) -> Callable[..., tuple[Any, list[str]]]:
    """Return a function that runs code and returns (the code's output, the calls that libcuda recorded)."""

    def run_code(code: str, fail: str = "") -> tuple[Any, list[str]]:
        log = tmp_path / "log"
        environment = {
            "PATH": "/usr/bin:/bin",
            "STUB_LOG": str(log),
            "STUB_FAIL": fail,
            "LD_LIBRARY_PATH": str(stub.parent),
        }
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + code, str(stub)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=HERE.parents[1],
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), log.read_text().splitlines()

    return run_code


def test_every_call_reaches_the_driver_as_it_should(run: Callable[..., tuple[Any, list[str]]]) -> None:
    """Numbers, handles and structures arrive, answers come back, and each call restores the context."""
    values, log = run(EVERYTHING)
    facts, seen, same, zeroed, ranges, capable, handle, opened, short, exported, imported, mapped = values[
        :12
    ]
    uuid = "29292929-2929-2929-2929-292929292929"
    assert facts[:7] == [13020, 2, 1, "Stub 41", [9, 0], 132, 1 << 37]
    assert facts[7:10] == [uuid, [uuid.replace("29", "28"), uuid], "0000:29:00.0"]
    assert facts[10:] == [True] * 6
    assert seen == "ff" * 8 + b"abcdabcd".hex() + "00" * 4
    assert (same, zeroed, ranges, capable) == (True, "00" * 16, [100, 4096], True)
    assert (handle, opened, short) == (list(range(64)), 4096, "UsageError")
    assert (exported, imported, mapped) == (33, 78, 8192)
    # A captured stream, the per-thread stream, one whose capture is invalid, a free one, and the legacy stream twice.
    states = [[True, 55], [True, 55], [True, 0], [False, 0], [False, 0], [False, 0]]
    assert values[12:] == [states, False, "UsageError", "ClosedError", 0]
    granule = 2 << 20
    for line in (
        "cuDevicePrimaryCtxRetain 41",
        "cuDeviceCanAccessPeer 41 40",
        "cuDeviceGetP2PAttribute 3 41 40",
        "cuCtxEnablePeerAccess 0x190 0",
        "cuMemHostAlloc 16 3",
        "cuPointerGetAttribute 10",
        "cuIpcOpenMemHandle 0 63 1",
        "cuMemGetAllocationGranularity 1 1 1 1",
        f"cuMemCreate {granule} 1 1",
        "cuMemExportToShareableHandle 77 1",
        "cuMemImportFromShareableHandle 33 1",
        f"cuMemMap 8192 {granule} 0 78",
        f"cuMemSetAccess 8192 {granule} 1 3 1",
        f"cuMemAddressFree 8192 {granule}",
        "cuMulticastGetGranularity 4 100 1 0 0",
        f"cuMulticastCreate 4 {granule} 1 0",
        "cuMulticastAddDevice 79 41",
        f"cuMulticastBindMem 79 0 77 0 {granule} 0",
        f"cuMulticastUnbind 79 41 0 {granule}",
        "cuMemRelease 79",
        "cuModuleLoadData cubin",
        "cuModuleGetFunction 0x1f4 push",
        "cuFuncLoad 0x258",
        f"cuLaunchKernel 0x258 32 1 1 256 1 1 0 0x2bc {1 << 40} 7 (nil) depth 0",
        f"cuLaunchKernel 0x258 33 1 1 256 1 1 0 (nil) {1 << 40} 8 (nil) depth 0",
        f"cuLaunchKernelEx 0x258 34 1 1 128 1 1 0 0x2bc {1 << 40} 8 (nil)",
        f"cuLaunchKernelEx 0x258 34 1 1 128 1 1 0 0x9 {1 << 40} 8 (nil)",
        f"cuLaunchKernelEx 0x258 36 1 1 256 1 1 0 0x9 {1 << 40} 8 (nil) cluster 4 1 1 attribute 6 1",
        "cuMemcpyDtoHAsync 8 0x2bc",
        "cuMemcpyDtoHAsync 20 (nil)",
        "cuMemcpyHtoDAsync 4 0x2bc",
        "cuStreamCreate 1",
        "cuStreamSynchronize 0x2bc",
        "cuStreamDestroy 0x2bc",
        "cuEventCreate 2",
    ):
        assert line in log
    # Whoever copies out of this process's memory waits for the copy, and for no other stream.
    copied = log.index("cuMemcpyHtoDAsync 4 0x2bc")
    assert log[copied + 1] == "cuStreamSynchronize 0x2bc"
    # Relaxed (2) from here on; a query of an event restores the mode.
    modes = [line for line in log if line.startswith("cuThreadExchangeStreamCaptureMode")]
    assert modes[-1].endswith(" 2")
    assert len(modes) % 2 == 1
    assert log.count("cuDevicePrimaryCtxRelease 41") == 1
    assert log.count("cuDevicePrimaryCtxRelease 40") == 1


@pytest.mark.parametrize(
    ("fail", "code", "kind", "text"),
    [
        (
            "cuMemAlloc:700:1",
            "outcome(lambda: CudaDriver(1).mem_alloc(8))",
            "CudaError",
            "ILLEGAL_ADDRESS (700): an",
        ),
        (
            "cuMemAlloc:9876:1",
            "outcome(lambda: CudaDriver(1).mem_alloc(8))",
            "CudaError",
            "failed with error 9876, which",
        ),
        ("cuInit:100:1", "outcome(lambda: CudaDriver(1))", "CapabilityError", "no CUDA device"),
        ("", "outcome(lambda: CudaDriver(2))", "CapabilityError", "this process sees 2"),
    ],
)
def test_errors_say_what_failed(
    run: Callable[..., tuple[Any, list[str]]], fail: str, code: str, kind: str, text: str
) -> None:
    """An error names the library with its version, the function, the code and the driver's own text."""
    (name, message, fields), _ = run(f"print(json.dumps({code}))", fail)
    assert name == kind
    assert text in message
    if kind == "CudaError":
        assert "libcuda 13.2" in message
        code_of = int(fail.split(":")[1])
        assert fields == {"library": "libcuda 13.2", "function": "cuMemAlloc", "code": code_of}


def test_a_launch_from_a_thread_without_a_context_is_made_in_ours(
    run: Callable[..., tuple[Any, list[str]]],
) -> None:
    """The first attempt fails without a context; the second one sets ours and removes it afterwards."""
    code = """
driver = CudaDriver(1)
function = driver.module_function(driver.module_load(b"cubin"), "push")
driver.launch(function, 1, 32, 0, PreparedLaunch([bytes(8), bytes(4)]))
print(json.dumps(library.stub_depth()))
"""
    depth, log = run(code, "cuLaunchKernel:201:1")
    assert depth == 0
    assert [line.rpartition(" ")[2] for line in log if line.startswith("cuLaunchKernel")] == ["0", "1"]
    code = code.replace("driver.launch(function, 1, 32, 0, ", "driver.launch_configured(plain, 0, ").replace(
        "driver.launch_", "plain = driver.configure(function, 1, 32)\ndriver.launch_"
    )
    depth, log = run(code, "cuLaunchKernelEx:201:1")
    assert (depth, len([line for line in log if line.startswith("cuLaunchKernelEx")])) == (0, 2)
    undone, log = run(
        "print(json.dumps(outcome(lambda: CudaDriver(1).vmm_map(5, 4096))[0]))", "cuMemSetAccess:700:1"
    )
    assert undone == "CudaError"
    assert log[-2:] == ["cuMemUnmap 8192 4096", "cuMemAddressFree 8192 4096"]
