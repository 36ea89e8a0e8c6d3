"""What we ask NVML, through NVIDIA's bindings and a stand-in for its library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from device_comm.cuda.driver_bindings import bindings
from device_comm.cuda.nvml import links_of
from shm_broadcast.errors import CapabilityError

HERE = Path(__file__).parent
ASK = """
import json, sys
from device_comm.cuda.driver_bindings import bindings
from device_comm.cuda.nvml import links_of
from shm_broadcast.errors import CapabilityError
first, second = "00000001-0000-0000-0000-0000000000ab", "00000002-0000-0000-0000-0000000000ab"
try:
    links_of(bindings("nvml"), "12345678-0000-0000-0000-000000000000")
    refused = ""
except CapabilityError as error:
    refused = str(error)
print(json.dumps([links_of(bindings("nvml"), first), links_of(bindings("nvml"), second), refused]))
"""


def ask(library: Path | None) -> subprocess.CompletedProcess[str]:
    """Ask in another process, which finds `library` or none."""
    environment = {"PATH": "/usr/bin:/bin"} | (
        {} if library is None else {"LD_LIBRARY_PATH": str(library.parent)}
    )
    return subprocess.run(
        [sys.executable, "-c", ASK],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=HERE.parents[1],
        check=False,
    )


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """Compile the stand-in and return its path."""
    library = tmp_path / "libnvidia-ml.so.1"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", str(library)]
    subprocess.run([*command, str(HERE / "libnvml_stub.c")], check=True)
    return library


def test_the_links_of_a_device_to_all_others_are_told(stub: Path) -> None:
    """By their UUIDs as CUDA gives them; access takes reading and writing. An unknown device is refused by name."""
    done = ask(stub)
    assert done.returncode == 0, done.stderr
    first, second, refused = json.loads(done.stdout)
    tail = "-0000-0000-0000-0000000000ab"
    assert first == {f"00000002{tail}": [True, True], f"00000003{tail}": [False, False]}
    assert second == {f"00000001{tail}": [True, True], f"00000003{tail}": [False, False]}
    assert "12345678-0000-0000-0000-000000000000" in refused


def test_a_machine_without_nvml_is_told() -> None:
    """The error is one of ours, which a probe notes as a problem."""
    done = ask(None)
    assert "NVML does not tell the links" in done.stderr
    assert "CapabilityError" in done.stderr


@pytest.mark.parametrize("known", [{}, {"NvmlError": OSError}, {"init_v2": int, "shutdown": int}])
def test_bindings_with_other_names_are_told(known: dict[str, object]) -> None:
    """A name that another version lacks is no AttributeError, which would leave the probe of one rank alone."""
    with pytest.raises(CapabilityError, match="NVML does not tell the links of device 1234: AttributeError"):
        links_of(SimpleNamespace(**known), "1234")


def test_nvml_is_closed_after_each_question() -> None:
    """It is opened and closed as often, whether it knows the device or not."""
    opened: list[int] = []

    def handle(name: str) -> int:
        if name == "GPU-unknown":
            raise RuntimeError(name)
        return 1

    known = SimpleNamespace(
        init_v2=lambda: opened.append(1),
        shutdown=lambda: opened.append(-1),
        device_get_handle_by_uuid=handle,
        device_get_count_v2=lambda: 0,
        GpuP2PCapsIndex=None,
    )
    assert links_of(known, "1234") == {}
    assert opened == [1, -1]
    with pytest.raises(CapabilityError, match="unknown"):
        links_of(known, "unknown")
    assert opened == [1, -1, 1, -1]


def test_bindings_without_nvml_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says which versions have it: those of the extra may not."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvml", None)
    with pytest.raises(
        CapabilityError, match="whose nvml cannot be imported .*; update it, for example to 12.9.10"
    ):
        bindings("nvml")
