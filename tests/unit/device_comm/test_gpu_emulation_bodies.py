"""What the emulation of `tests/gpu` computes, over kernels that g++ compiled."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from device_comm.cuda.driver import PreparedLaunch
from shm_broadcast.errors import CudaError
from tests.expert_ranks import cases
from tests.fake_cuda import fake_cubin
from tests.fake_gpu import FakeGpu
from tests.gpu.emulation import Emulation, check_variant
from tests.gpu.expert_emulation import (
    CapturedExchange,
    ExpertEmulation,
    check_experts,
    experts_of_one_variant,
    replayed_cases,
    replays_of_one_variant,
)
from tests.gpu.fused_emulation import Rows, check_finalize, check_quantised, fused_of_one_variant
from tests.gpu.test_emulation import judge_sanitizer
from tests.gpu.values import WrongResultError
from tests.native.cuda.host_build import build_host_library


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@dataclasses.dataclass
class Emulated:
    """A fake GPU that runs the kernels of two ranks, as g++ compiled them."""

    library: Path
    driver: FakeGpu

    def cubin(self, *_: object) -> bytes:
        """Return what the driver loads, for any family."""
        return fake_cubin(self.library)


@pytest.fixture
def gpu(folder: Path, tmp_path: Path) -> Iterator[Emulated]:
    """Yield one; nothing may be left on it."""
    library = build_host_library(2, "bfloat16", folder, emulate=True)
    driver = FakeGpu(tmp_path, 0, library)
    yield Emulated(library, driver)
    assert driver.leaks() == []
    driver.release()


@pytest.mark.slow
def test_the_emulation_compares_every_algorithm(gpu: Emulated) -> None:
    """The tables, the workspaces and the references fit the kernels; a word that is wrong is noticed."""
    driver, cubin = gpu.driver, gpu.cubin
    emulation = Emulation(driver, 2, "bfloat16", cubin, largest=4096)
    assert check_variant(emulation, (1, 9, 100, 513), full=False) == 4 * 4 + 5 + 2 * 5 + 3
    ones = [torch.ones(16, dtype=torch.bfloat16)] * 2
    right = emulation.call
    assert torch.equal(right("push_one_shot", ones, 16, 16)[1], torch.full((16,), 2.0, dtype=torch.bfloat16))
    emulation.call = lambda *arguments: [each + 1 for each in right(*arguments)]  # type: ignore[method-assign]
    with pytest.raises(WrongResultError, match="differ, the first at 0"):
        check_variant(emulation, (16,), full=False)
    emulation.close()


@pytest.mark.slow
def test_the_emulation_compares_exchanges_of_tokens(gpu: Emulated) -> None:
    """The tables fit the expert-parallel kernels; rows of another rank are noticed."""
    driver, cubin = gpu.driver, gpu.cubin
    assert experts_of_one_variant(driver, 2, "bfloat16", cubin, 20.0) == 36
    emulation = ExpertEmulation(driver, 2, "bfloat16", cubin)
    right = emulation.launch
    emulation.launch = lambda kernel, structures: right(kernel, structures[::-1])  # type: ignore[method-assign]
    with pytest.raises(WrongResultError, match="differ"):
        check_experts(emulation, cases(2, torch.bfloat16)[0], is_compact=False)
    emulation.close()


@pytest.mark.slow
def test_the_emulation_compares_fused_calls(gpu: Emulated) -> None:
    """Norms with 8 and 4 bits and sums of experts, fused and alone; a wrong scale and a wrong rank are noticed."""
    driver, cubin = gpu.driver, gpu.cubin
    norms, experts = ((1, 64), (3, 1024), (2, 2560)), ((3, 64, 2), (5, 40, 8), (4, 16, 0))
    shapes: dict[str, Any] = {"norms": norms, "sums": experts, "deadline_s": 20.0}
    # One of the shapes is too narrow for two shots.
    assert fused_of_one_variant(driver, 2, "bfloat16", cubin, **shapes) == 3 * (3 * 3 - 1) + 2 * 2 * 3
    emulation = Emulation(driver, 2, "bfloat16", cubin, largest=4096)
    right = emulation.launch

    def other_scale(kernel: str, items: int, arguments: list[bytes], fewest: int) -> None:
        right(kernel, items, [*arguments[:-2], arguments[1], arguments[-1]], fewest)

    given = Rows.of(emulation, 2, 128)
    for kernel in ("push_add_rms_norm_fp8", "add_rms_norm_nvfp4"):
        check_quantised(emulation, kernel, given, torch.tensor([0.5]))
        emulation.launch = other_scale  # type: ignore[assignment]
        with pytest.raises(WrongResultError, match=f"{kernel} of 2 x 128, one scale: "):
            check_quantised(emulation, kernel, given, torch.tensor([0.5]))
        emulation.launch = right  # type: ignore[method-assign]
    emulation.launch = lambda kernel, *rest: right("moe_finalize", *rest)  # type: ignore[method-assign]
    with pytest.raises(WrongResultError, match="push_moe_finalize of 3 x 64, 2 experts, rank 0"):
        check_finalize(emulation, 3, 64, 2, has_shared=True)
    emulation.close()


@pytest.mark.slow
def test_the_emulation_replays_exchanges_of_tokens(gpu: Emulated) -> None:
    """Each replay reads new tokens; sums of the tokens before are noticed."""
    driver, cubin = gpu.driver, gpu.cubin
    assert replays_of_one_variant(driver, 2, "bfloat16", cubin, 20.0) == 12
    emulation = ExpertEmulation(driver, 2, "bfloat16", cubin, 20.0)
    first, second, *_ = replayed_cases(2, torch.bfloat16)
    captured = CapturedExchange(emulation, first, is_compact=True)
    captured.replay(first)
    # The ids of another case with the tokens of this one.
    mixed = dataclasses.replace(second, hidden=first.hidden)
    captured.replay(mixed)
    run = driver.replay
    driver.replay = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(WrongResultError, match="sums"):
        captured.replay(second)
    driver.replay = run  # type: ignore[method-assign]
    captured.replay(second)
    captured.close()
    emulation.close()


def test_the_fake_refuses_block_rows_that_cannot_run_at_once(tmp_path: Path) -> None:
    """As a cooperative launch does: the emulation must choose its grid by the multiprocessors."""
    driver = FakeGpu(tmp_path, 0)
    arguments: Any = PreparedLaunch([b"\0" * 8])
    with pytest.raises(CudaError):
        driver.launch_cooperative(1, (100, 2), 128, 0, arguments)
    driver.release()


def test_the_sanitizer_is_believed_only_when_the_subset_ran() -> None:
    """An error is a failure, silence too; a tool that refuses the machine or is too slow says so."""
    say = [sys.executable, "-c"]
    assert judge_sanitizer([*say, "print('small subset compared: 3 calls')"], 20.0) is None
    with pytest.raises(AssertionError, match="ended with 9"):
        judge_sanitizer([*say, "print('ERROR SUMMARY: 1 error'); raise SystemExit(9)"], 20.0)
    with pytest.raises(AssertionError, match="ended with 0"):
        judge_sanitizer([*say, "pass"], 20.0)
    refused = judge_sanitizer([*say, "print('Device not supported'); raise SystemExit(1)"], 20.0)
    assert refused is not None
    assert "refuses" in refused
    assert "longer" in str(judge_sanitizer([*say, "import time; time.sleep(9)"], 0.3))
