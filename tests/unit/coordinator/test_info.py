"""`python -m coordinator info` explains what CUDA_VISIBLE_DEVICES leaves to a process."""

import json
import sys
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.cli import info, main


class Shown:
    """A device that CUDA shows."""

    def uuid(self) -> str:
        return "8932f937-d72c-4106-c12f-20bd9faed9f6"


class NvmlError(Exception):
    """What NVML's functions raise."""


class NotFoundError(NvmlError):
    """There is no MIG instance of this number."""


class Nvml(ModuleType):
    """Two devices: 0 is whole, 1 is cut into instances 0 and 2."""

    NvmlError = NvmlError
    NotFoundError = NotFoundError

    def __init__(self, problem: str = "") -> None:
        super().__init__("nvml")
        self._problem = problem

    def init_v2(self) -> None:
        if self._problem:
            raise NvmlError(self._problem)

    def device_get_count_v2(self) -> int:
        return 2

    def device_get_handle_by_index_v2(self, index: int) -> int:
        return 100 * index

    def device_get_uuid(self, handle: int) -> str:
        return f"{'MIG' if handle % 100 else 'GPU'}-{handle}"

    def device_get_name(self, handle: int) -> str:
        return "NVIDIA H200"

    def device_get_max_mig_device_count(self, handle: int) -> int:
        return 3 if handle else 0

    def device_get_mig_device_handle_by_index(self, handle: int, number: int) -> int:
        if number == 1:
            raise NotFoundError
        return handle + number + 1


def use_nvml(monkeypatch: pytest.MonkeyPatch, nvml: ModuleType | None) -> None:
    """Let `from cuda.bindings import nvml` find this, or nothing."""
    bindings: Any = ModuleType("cuda.bindings")
    if nvml is not None:
        bindings.nvml = nvml
    monkeypatch.delitem(sys.modules, "cuda.bindings.nvml", raising=False)
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)


@pytest.mark.parametrize(
    ("text", "shown", "why"),
    [
        ("", 0, "nothing, all entries are shown"),
        ("2, 1", 2, "nothing, all entries are shown"),
        ("MIG-cba663e8", 1, "nothing, all entries are shown"),
        ("0,4,1", 1, "entry 2 of 3, '4': there is no device with this number"),
        ("0,2,-1,1", 2, "entry 3 of 4, '-1': a negative number ends the list"),
        ("0,x,1", 1, "entry 2 of 3, 'x': neither a number nor a UUID that begins with GPU- or MIG-"),
        ("0,,1", 1, "entry 2 of 3, '': neither a number nor a UUID that begins with GPU- or MIG-"),
        ("GPU-ff,GPU-77", 1, "entry 2 of 2, 'GPU-77': no device has this UUID, or several begin with it"),
        ("MIG-c", 0, "entry 1 of 1, 'MIG-c': no device has this UUID, or several begin with it"),
        ("MIG-a,1", 1, "entry 2 of 2, '1': a process sees a single MIG instance and no other device"),
        ("0,MIG-a", 1, "entry 2 of 2, 'MIG-a': a process sees a single MIG instance and no other device"),
        ("GPU-8,gpu-8", 0, "entry 1 of 2, 'GPU-8': a duplicate entry hides all devices"),
    ],
)
def test_the_entry_that_ended_the_list_is_named_with_a_reason(text: str, shown: int, why: str) -> None:
    """Ordinals, UUIDs and MIG names: CUDA shows fewer devices than were asked for, and info says at which entry."""
    drivers = [Shown()] * shown if shown else "CapabilityError: there is no CUDA device: CUDA_ERROR_NO_DEVICE"
    found = info._visible(text, drivers)
    assert found["ended by"] == why
    assert found["shows"] == ([Shown().uuid()] * shown if shown else drivers)


def test_no_reason_is_named_if_cuda_was_not_asked() -> None:
    """A missing package or driver says nothing about the entries."""
    assert (
        info._visible("0", "CapabilityError: the package cuda-bindings is missing")["ended by"] == "unknown"
    )


@given(st.text(alphabet="0123-+,GPUMIG/ abcdef\n\u0663\u00b2", max_size=40), st.integers(0, 5))
def test_any_text_gets_a_reason(text: str, shown: int) -> None:
    """Whatever stands in the variable, nothing is raised."""
    assert info._ended_by(text, shown)


def test_every_name_that_the_variable_takes_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices and MIG instances, hidden ones too, as NVML calls them."""
    use_nvml(monkeypatch, Nvml())
    assert info._visible("7", "no device")["plugged in"] == [
        "0: GPU-0 NVIDIA H200",
        "1: GPU-100 NVIDIA H200",
        "1: MIG-101",
        "1: MIG-103",
    ]


@pytest.mark.parametrize(
    ("nvml", "text"), [(None, "NVML needs cuda-bindings"), (Nvml("not loaded"), "NvmlError: not loaded")]
)
def test_info_goes_on_without_nvml(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], nvml: ModuleType | None, text: str
) -> None:
    """Neither a missing package nor a missing driver keeps a bug report from being written."""
    use_nvml(monkeypatch, nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-GPU-8932f937/1/0")
    assert main(["info", "--no-start", "--json"]) == 0
    visible = json.loads(capfd.readouterr().out)["CUDA_VISIBLE_DEVICES"]
    assert visible["text"] == "MIG-GPU-8932f937/1/0"
    assert text in visible["plugged in"]
