"""The kernels run as threads, with stalls, wraps and changing grids; each planted mistake is noticed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from device_comm.cuda import kernels
from tests.native.cuda.host_build import HERE, compile_host

ROOT = HERE.parents[2]
PATCHES = sorted((HERE / "mutations").glob("*.patch"))
SEEDS = (1, 2)
# The kinds of builds: a plain one, one with a model of clears that reach memory late, and one for ThreadSanitizer.
NATIVE: tuple[str, ...] = ()
# Most programs compile for longer than they run, the more so the more is optimised.
BRIEF = ("-Og",)
WEAK = ("-DGC_WEAK_CLEARS=1",)
TSAN = ("-fsanitize=thread", "-g1", "-Wno-tsan")
# The plain build must notice a mutation, unless another kind of build is named here.
MODES = {
    "fence_dropped": WEAK,
    "weak_clear": TSAN,
    "release_made_relaxed": TSAN,
    "expert_release_made_relaxed": TSAN,
    "expert_acquire_made_relaxed": TSAN,
    "expert_phase_forced_to_0": TSAN,
    "expert_barrier_before_the_flag_dropped": TSAN,
    "expert_barrier_behind_the_flags_dropped": TSAN,
}
ONLY = {
    "fence_dropped": "push_one_shot",
    "weak_clear": "push_one_shot",
    "release_made_relaxed": "pull_two_shot",
    "end_barrier_dropped": "pull_one_shot",
    "flags_compared_off_the_circle": "pull_two_shot",
    "one_flag_unchecked": "push_all_gather",
    "norm_sum_in_thread_order": "push_add_rms_norm",
    "residual_not_rounded_first": "push_add_rms_norm",
    "group_sums_not_exchanged": "push_add_rms_norm",
    "kept_vector_used_for_all": "push_add_rms_norm",
    "sums_of_owners_not_cleared": "push_two_shot_add_rms_norm",
    "fp8_ties_rounded_up": "push_add_rms_norm_fp8",
    "fp8_largest_of_own_block": "push_two_shot_add_rms_norm_fp8",
    "fp8_of_the_norm_before_rounding": "push_add_rms_norm_fp8",
    "fp8_row_scale_not_stored": "push_two_shot_add_rms_norm_fp8",
    "nvfp4_by_the_scale_before_rounding": "push_add_rms_norm_nvfp4",
    "nvfp4_pairs_swapped": "push_two_shot_add_rms_norm_nvfp4",
    "finalize_own_sum_not_kept": "push_moe_finalize",
    "finalize_adds_missing_experts": "push_moe_finalize",
    "finalize_in_reverse_order": "push_moe_finalize",
    "alias_fence_dropped": "multimem_two_shot",
    "staged_in_order_of_the_tensor": "multimem_two_shot",
    "results_read_before_all_have_stored": "multimem_two_shot",
    "every_rank_sums_every_shard": "multimem_two_shot",
    "staged_again_before_all_have_summed": "multimem_one_shot",
    "staging_reused_too_early": "staged_all_gather",
    "parts_read_before_they_are_staged": "staged_all_gather",
}
DTYPE = {
    "norm_sum_in_thread_order": "float32",
    "finalize_in_reverse_order": "float32",
    "expert_sum_in_reverse_order": "float32",
}
"""Mutations that need another dtype than bfloat16, whose rounding hides the last bits of a sum."""
STALLS_PER_MILLION = 3000
DEADLINE_MS = 10_000
MUTANT_DEADLINE_MS = 300
"""A short deadline, because some mutants do nothing but wait."""


def stress(
    program: Path, launches: int, seed: int, only: str = "", deadline_ms: int = DEADLINE_MS
) -> subprocess.CompletedProcess[str]:
    """Run the program. Its exit status tells whether every result was right."""
    options = [str(each) for each in (launches, seed, STALLS_PER_MILLION, deadline_ms)]
    # It needs setarch because GCC 12's ThreadSanitizer does not start with newer Linux's address randomisation.
    command = ["setarch", "-R"] if shutil.which("setarch") else []
    command += [str(program), *options, *([only] if only else [])]
    # The first race ends the program: it would go on slowly, and report more of them.
    environ = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that compiles the stress program, or the one of the exchange if the name says so."""
    folder = tmp_path_factory.mktemp("stress")

    def compiled(
        name: str,
        options: tuple[str, ...] = NATIVE,
        source: str = "",
        world_size: int = 3,
        dtype: str = "bfloat16",
    ) -> Path:
        text = folder / f"{name}.cu"
        text.write_text(source or kernels.kernel_source())
        program = "expert_stress.cpp" if name.startswith("expert_") else "stress.cpp"
        compile_host(text, program, folder / name, world_size, dtype, options)
        return folder / name

    return compiled


@pytest.mark.parametrize(
    ("world_size", "dtype", "seeds"),
    [
        (2, "float32", SEEDS[:1]),
        pytest.param(2, "float32", SEEDS[1:], marks=pytest.mark.thorough),
        pytest.param(3, "bfloat16", SEEDS, marks=pytest.mark.thorough),
        pytest.param(4, "float16", SEEDS, marks=pytest.mark.thorough),
        pytest.param(8, "bfloat16", SEEDS, marks=pytest.mark.thorough),
    ],
)
def test_thousands_of_launches_are_right(
    build: Callable[..., Path], world_size: int, dtype: str, seeds: tuple[int, ...]
) -> None:
    """All kernels run in turn, while epochs wrap, grids change and stalls occur between any two words."""
    program = build(f"plain_{world_size}_{dtype}", BRIEF, world_size=world_size, dtype=dtype)
    for seed in seeds:
        done = stress(program, 2400 // world_size, seed * 10_000)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.thorough
def test_results_are_right_although_clears_arrive_late(build: Callable[..., Path]) -> None:
    """The fence at the entry keeps a late clear from erasing what a peer pushes."""
    done = stress(build("weak", (*WEAK, *BRIEF)), 300, 5)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.thorough
def test_no_data_race(build: Callable[..., Path]) -> None:
    """ThreadSanitizer reports nothing: ranks share memory only through atomics or across a barrier."""
    done = stress(build("tsan", TSAN), 120, 6)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.guarantee("D80")
@pytest.mark.parametrize(
    ("world_size", "dtype", "seeds"),
    [
        pytest.param(2, "float32", SEEDS, marks=pytest.mark.thorough),
        pytest.param(3, "bfloat16", SEEDS, marks=pytest.mark.thorough),
        pytest.param(5, "float32", SEEDS, marks=pytest.mark.thorough),
        pytest.param(8, "bfloat16", SEEDS, marks=pytest.mark.thorough),
    ],
)
def test_hundreds_of_exchanges_are_right(
    build: Callable[..., Path], world_size: int, dtype: str, seeds: tuple[int, ...]
) -> None:
    """Dispatches and combines of any shapes follow each other while ranks pause, stall, and epochs wrap."""
    program = build(f"expert_plain_{world_size}_{dtype}", BRIEF, world_size=world_size, dtype=dtype)
    for seed in seeds:
        done = stress(program, 1200 // world_size, seed * 10_000)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.thorough
def test_exchanges_have_no_data_race(build: Callable[..., Path]) -> None:
    """Rows are weak accesses, which ThreadSanitizer checks: flags alone order them between ranks."""
    for world_size in (2, 4):
        done = stress(build(f"expert_tsan_{world_size}", TSAN, world_size=world_size), 150, 6)
        assert done.returncode == 0, done.stdout + done.stderr


def mutated_source(patch: Path, folder: Path) -> str:
    """Apply a patch to a copy of the kernels; return the copy."""
    copy = folder / patch.stem
    shutil.copytree(ROOT / "device_comm" / "csrc", copy / "device_comm" / "csrc")
    command = ["patch", "-p1", "--batch", "--forward", "--fuzz=0", "-i", str(patch)]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{patch.name} does not apply any more:\n{done.stdout}"
    return "".join((copy / "device_comm" / "csrc" / "cuda" / name).read_text() for name in kernels.FRAGMENTS)


def test_every_patch_applies(tmp_path: Path) -> None:
    """There are as many as ever, and every patch fits the source. One that no longer fits would test nothing."""
    assert len(PATCHES) >= 50
    for patch in PATCHES:
        mutated_source(patch, tmp_path)


@pytest.mark.thorough
def test_every_mutation_is_noticed(build: Callable[..., Path], tmp_path: Path) -> None:
    """The stress program fails for each with a wrong result, a rank that waits for ever or a data race."""

    def survives(patch: Path) -> str | None:
        name = patch.stem
        source, dtype = mutated_source(patch, tmp_path), DTYPE.get(name, "bfloat16")
        only = ONLY.get(name, "")
        options = MODES.get(name, NATIVE) + BRIEF + ((f"-DGC_ONLY={only}",) if only else ())
        program = build(name, options, source, dtype=dtype)
        for seed in SEEDS:
            if stress(program, 600, seed, only, MUTANT_DEADLINE_MS).returncode != 0:
                return None
        return name

    with ThreadPoolExecutor(2) as pool:
        assert [name for name in pool.map(survives, PATCHES) if name] == []
