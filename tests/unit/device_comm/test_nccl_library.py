"""Find, load and call libnccl: the stub, and the real library as far as it works without a device."""

import ctypes
import dataclasses
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from device_comm.base import CommunicatorContext
from device_comm.health import GroupHealth
from device_comm.nccl import library
from device_comm.nccl.communicator import NcclCommunicator
from device_comm.nccl.dtypes import DATA_TYPES, REDUCTIONS
from device_comm.nccl.library import (
    FUNCTIONS,
    RESULT_NAMES,
    ROOTS_FUNCTIONS,
    WINDOW_FUNCTIONS,
    Config,
    NcclLibrary,
    UniqueId,
    loaded_libraries,
    new_config,
    version_text,
)
from device_comm.nccl.window import SYMMETRIC, WINDOWS_SINCE
from shm_broadcast.errors import CapabilityError, InternalError, NcclError, UsageError
from tests.harness import run_ranks
from tests.native.nccl_stub.build import build_stub
from tests.nccl_ranks import HostStreams
from tests.probes import requires
from tests.unit.device_comm.test_health import FakeStatusStore, FakeWatch

ROOTS_SINCE = 22300
"""The version of NCCL that has `ROOTS_FUNCTIONS`."""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stub(tmp_path_factory.mktemp("nccl"))


def test_versions_are_read_in_both_spellings() -> None:
    """Versions from 2.9 on have five digits, earlier ones four."""
    assert [version_text(code) for code in (2804, 21800, 22907, 23203)] == [
        "2.8.4",
        "2.18.0",
        "2.29.7",
        "2.32.3",
    ]


def test_the_library_knows_its_file_and_version(stub: Path) -> None:
    """File and version come from the loader, not from the request."""
    link = stub.with_name("link.so")
    link.symlink_to(stub)
    library = NcclLibrary(link)
    assert (library.path, library.version) == (str(stub), 23203)
    assert str(library) == f"NCCL 2.32.3 ({stub})"


def test_an_error_has_all_that_is_known(stub: Path) -> None:
    """An error holds function, code and its name, both NCCL texts, file and version, as text and fields."""
    library = NcclLibrary(stub)
    ctypes.CDLL(str(stub)).stub_fail(b"ncclGetUniqueId", 6, 1)
    with pytest.raises(NcclError) as caught:
        library.new_unique_id()
    error = caught.value
    assert (error.function, error.code, error.library) == ("ncclGetUniqueId", 6, str(library))
    for part in (
        "ncclGetUniqueId returned 6",
        "ncclRemoteError",
        "remote process exited",
        "the stub was told to fail",
    ):
        assert part in str(error)
    assert str(stub) in str(error)
    assert "an unknown code" in str(library.error("ncclSend", 99))


def test_too_old_or_no_nccl_is_refused(tmp_path: Path, stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing file, another library and an old NCCL are refused with what is needed."""
    with pytest.raises(CapabilityError, match="cannot be loaded") as missing:
        NcclLibrary(tmp_path / "libnccl.so.2")
    assert missing.value.requirement == "libnccl.so.2"
    with pytest.raises(CapabilityError, match="is no NCCL") as other:
        NcclLibrary("libm.so.6")
    assert other.value.requirement == "libnccl"
    with pytest.raises(CapabilityError, match=r"2\.18\.0 or newer is needed") as old:
        NcclLibrary(build_stub(tmp_path, "-DVERSION=21705"))
    assert old.value.requirement == "NCCL >= 2.18.0"
    monkeypatch.setitem(library.FUNCTIONS, "ncclOfTheFuture", ())
    with pytest.raises(CapabilityError, match="ncclOfTheFuture") as older:
        NcclLibrary(stub)
    assert older.value.requirement == "NCCL >= 2.18.0"


def test_the_library_of_the_process_comes_first(
    tmp_path: Path, stub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loaded library is preferred to the wheel's; a given path beats both."""
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 1  /opt/a b/libnccl.so.2.21.5\n"
        "7f01-7f02 r--p 00000000 08:01 1  /opt/a b/libnccl.so.2.21.5\n"
        "7f03-7f04 r--p 00000000 08:01 2  /usr/lib/libnccl-net.so\n7f05-7f06 rw-p 00000000 00:00 0\n"
    )
    assert loaded_libraries(maps) == ["/opt/a b/libnccl.so.2.21.5"]
    other = build_stub(tmp_path, name="other.so")
    monkeypatch.setattr(library, "_of_wheels", lambda: iter([str(other)]))
    monkeypatch.setattr(library, "loaded_libraries", list)
    assert NcclLibrary().path == str(other)
    monkeypatch.setattr(library, "loaded_libraries", lambda: [str(stub)])
    assert NcclLibrary().path == str(stub)
    assert NcclLibrary(other).path == str(other)


def context() -> CommunicatorContext:
    health = GroupHealth("tp:0", 0, (0, 1), FakeWatch(), FakeStatusStore())  # type: ignore[arg-type]
    return CommunicatorContext(
        name="tp:0",
        rank_in_group=0,
        ranks=(0, 1),
        device=torch.device("cpu"),
        process_group=None,
        health=health,
        timeout_s=1.0,
    )


def test_a_context_without_an_exchange_is_refused(stub: Path) -> None:
    """Without an exchange the ranks could not agree on an id, so the context is refused."""
    with pytest.raises(InternalError, match="exchange"):
        NcclCommunicator(context(), library=NcclLibrary(stub), streams=HostStreams())


def test_a_forked_child_has_no_short_way(stub: Path) -> None:
    """A call in a forked child is refused before the library sees the parent's handles."""
    facts = dataclasses.replace(context(), exchange=lambda own: [own, own])
    communicator = NcclCommunicator(facts, library=NcclLibrary(stub), streams=HostStreams())
    connection = communicator._connection
    connection._handle = ctypes.c_void_p(16)
    connection.rearm()
    assert connection.hot is not None
    child = os.fork()
    if child == 0:
        try:
            communicator.all_reduce(torch.ones(1))
        except UsageError:
            os._exit(0 if connection.hot is None else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


# --- the real one ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> NcclLibrary:
    return NcclLibrary(next(library._of_wheels()))


@requires("nccl")
def test_the_real_library_has_every_function(real: NcclLibrary) -> None:
    """The real library is the wheel's and has every function that we call, those of windows from 2.27 on."""
    windows = WINDOW_FUNCTIONS if real.version >= WINDOWS_SINCE else ()
    roots = ROOTS_FUNCTIONS if real.version >= ROOTS_SINCE else ()
    needed, known = {*FUNCTIONS, *windows, *roots}, {*FUNCTIONS, *WINDOW_FUNCTIONS, *ROOTS_FUNCTIONS}
    assert needed <= set(real.functions) <= known
    assert real.path.endswith("nvidia/nccl/lib/libnccl.so.2")
    assert real.version >= 21800


def _link(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""  # that of the listing itself


def own_listeners() -> list[str]:
    """Return the hexadecimal addresses on which this process listens by TCP."""
    links = [_link(name) for name in os.listdir("/proc/self/fd")]
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    rows = [
        line.split()
        for protocol in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{protocol}").read_text().splitlines()[1:]
    ]
    return [row[1].partition(":")[0] for row in rows if row[9] in inodes and row[3] == "0A"]


def ids_and_errors(rank: int, world_size: int, directory: Path) -> None:
    real = NcclLibrary(next(library._of_wheels()))
    first, second = real.new_unique_id(), real.new_unique_id()
    assert len(first) == 128
    assert first != second
    # NCCL listens for holders of the id, on addresses of this host and on no wildcard.
    assert own_listeners()
    assert all(set(address) != {"0"} for address in own_listeners())
    assert real.error_string(2)
    assert real.error_string(2) != real.error_string(6)
    if torch.cuda.is_available():
        return
    forms = [((first,), "ncclCommInitRankConfig"), ((first, second), "ncclCommInitRankScalable")]
    for ids, function in forms[: 1 + (real.version >= ROOTS_SINCE)]:
        with pytest.raises(NcclError) as caught:
            real.init_rank(len(ids), ids, 0, new_config())
        error = caught.value
        assert error.function == function
        assert error.code in {1, 2, 3}
        assert "it says: " in str(error)
        assert "cuda" in str(error).lower()
        assert real.path in str(error)


@requires("nccl")
def test_the_real_library_gives_ids_and_readable_errors() -> None:
    """Each id is new; joining without a device fails with the library's own text."""
    # In a separate process, because NCCL keeps listening for holders of the id.
    run_ranks(ids_and_errors, 1, check_leaks=False)


@requires("nccl")
@requires("compiler")
def test_our_structures_and_numbers_are_those_of_the_header(real: NcclLibrary, tmp_path: Path) -> None:
    """A program that includes nccl.h checks sizes, offsets, enumerators and parameters."""
    header = Path(real.path).parents[1] / "include"
    for name in ("cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h"):
        (tmp_path / name).write_text(
            "#pragma once\ntypedef struct stream* cudaStream_t;\ntypedef struct event* cudaEvent_t;\n"
            "#define CUDART_VERSION 13000\n"
        )
    fields = [name for name, *_ in Config._fields_]
    numbers = {
        "Int8": 0,
        "Uint8": 1,
        "Int32": 2,
        "Uint32": 3,
        "Int64": 4,
        "Uint64": 5,
        "Float16": 6,
        "Float32": 7,
    }
    numbers |= {"Float64": 8, "Bfloat16": 9, "Float8e4m3": 10, "Float8e5m2": 11}
    assert sorted(numbers.values()) == sorted(DATA_TYPES.values())
    reductions = {
        "ncclSum": "SUM",
        "ncclProd": "PRODUCT",
        "ncclMax": "MAX",
        "ncclMin": "MIN",
        "ncclAvg": "MEAN",
    }
    checks = [f"offsetof(ncclConfig_t, {name}) == {getattr(Config, name).offset}" for name in fields]
    checks += [
        f"ncclConfigMagic == 0x{new_config().magic:x}",
        f"sizeof(ncclUniqueId) == {ctypes.sizeof(UniqueId)}",
    ]
    checks += [f"nccl{name} == {number}" for name, number in numbers.items()]
    codes = {operation.name: code for operation, code in REDUCTIONS.items()}
    checks += [f"{name} == {codes[ours]}" for name, ours in reductions.items()]
    # Older versions of the library have fewer.
    results = re.findall(r"\b(nccl[A-Z]\w+) *= *\d+,", (header / "nccl.h").read_text())
    checks += [f"{name} == {code}" for code, name in enumerate(RESULT_NAMES) if name in results]
    checks += [f"ncclNumResults <= {len(RESULT_NAMES)}", "ncclNumResults >= 8"]
    checks += ["NCCL_CONFIG_UNDEF_INT == INT_MIN"]
    declared = set(re.findall(r"\b(nccl[A-Z]\w+)\(", (header / "nccl.h").read_text()))
    later = {**WINDOW_FUNCTIONS, **ROOTS_FUNCTIONS}
    functions = {**FUNCTIONS, **{name: kinds for name, kinds in later.items() if name in declared}}
    assert real.version < ROOTS_SINCE or set(ROOTS_FUNCTIONS) <= declared
    if real.version >= WINDOWS_SINCE:
        assert set(WINDOW_FUNCTIONS) <= declared
        checks += [f"NCCL_WIN_COLL_SYMMETRIC == {SYMMETRIC}", "sizeof(ncclWindow_t) == sizeof(void*)"]
    kinds = {
        ctypes.c_void_p: "void*",
        ctypes.c_size_t: "size_t",
        ctypes.c_int: "int",
        UniqueId: "ncclUniqueId",
    }
    calls = []
    for name, arguments in functions.items():
        # A pointer parameter accepts a void*, a number does not, so a wrong count or kind does not compile.
        given = ", ".join(f"*({kinds[each]}*)anything" for each in arguments)  # type: ignore[index]
        calls.append(f"  (void){name}({given});")
    program = tmp_path / "check.c"
    program.write_text(
        "#include <stddef.h>\n#include <nccl.h>\n#define ncclConfigMagic NCCL_API_MAGIC\n"
        + "".join(f'_Static_assert({check}, "{check}");\n' for check in checks)
        + "void calls(void* anything) {\n"
        + "\n".join(calls)
        + "\n}\n"
    )
    done = subprocess.run(
        [
            "cc",
            "-std=c11",
            "-fsyntax-only",
            "-Werror=int-conversion",
            f"-I{tmp_path}",
            f"-I{header}",
            str(program),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert set(FUNCTIONS) <= declared
