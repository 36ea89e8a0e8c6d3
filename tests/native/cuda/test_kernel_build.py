"""The CUDA kernels compile for every GPU that we name, need no local memory, and are cached safely on disk."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from device_comm.cuda import kernel_layout, kernels
from device_comm.cuda.kernels import DTYPES, FAMILIES, Compiled, KernelCache, KernelVariant, compile_kernels
from shm_broadcast.errors import CapabilityError, CudaError, UsageError
from tests.kernel_memory import ALGORITHMS, PARAMS_BYTES, required_arena, required_staging
from tests.native.cuda.compiled_kernels import CompiledKernels
from tests.native.cuda.host_build import shared_folder
from tests.samples import sampled

# One of each generation. `kernel_matrix.py` has every architecture that NVRTC knows, and every world size.
ARCHS = (75, 80, 90, 100, 120)
WORLDS = range(2, 9)
# The normal suite has the oldest, the newest, and the one whose machine code other tests read.
# Every architecture is combined with every dtype, and world sizes rotate.
LATIN = [
    (arch, (4, 8, 2)[(a + d) % 3], dtype) for a, arch in enumerate(ARCHS) for d, dtype in enumerate(DTYPES)
]
USAGE = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
PUSH = {
    "push_one_shot": "one_shot",
    "push_two_shot": "two_shot",
    "push_reduce_scatter": "shards",
    "push_all_gather": "shards",
    "push_add_rms_norm": "norm",
    "push_two_shot_add_rms_norm": "norm",
    "push_add_rms_norm_fp8": "norm_fp8",
    "push_two_shot_add_rms_norm_fp8": "norm_fp8",
    "push_moe_finalize": "finalize",
    "push_add_rms_norm_nvfp4": "norm_nvfp4",
    "push_two_shot_add_rms_norm_nvfp4": "norm_nvfp4",
}


@pytest.fixture(scope="session")
def kernels_of_run(tmp_path_factory: pytest.TempPathFactory) -> CompiledKernels:
    """What this process compiles, and what the others of the run have compiled."""
    return CompiledKernels(shared_folder(tmp_path_factory))


def check_no_local_memory(
    arch: int,
    world_size: int,
    dtype: str,
    compiled: Callable[[KernelVariant], Compiled] = compile_kernels,
) -> None:
    """Compile all families; assert that no kernel has a stack frame or spills."""
    for family, names in FAMILIES.items():
        if family == "multimem" and arch < kernels.MULTIMEM_ARCH:
            continue
        done = compiled(KernelVariant(arch, world_size, dtype, family))
        assert done.cubin[:4] == b"\x7fELF"
        found = USAGE.findall(done.log)
        assert len(found) == len(names), done.log
        assert set(found) == {("0", "0", "0")}, done.log
        assert "warning" not in done.log.lower(), done.log


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arch", "world_size", "dtype"),
    LATIN,
)
def test_no_spill_and_no_stack(
    kernels_of_run: CompiledKernels, arch: int, world_size: int, dtype: str
) -> None:
    """The registers hold all values of a kernel."""
    check_no_local_memory(arch, world_size, dtype, kernels_of_run.compiled)


@pytest.mark.parametrize("family", sampled(3, FAMILIES))
def test_the_emulation_compiles(family: str) -> None:
    """The build that runs all ranks in one launch, for tests on one GPU, has no spill and no stack either."""
    done = compile_kernels(KernelVariant(90, 4, "bfloat16", family, emulate=True))
    assert set(USAGE.findall(done.log)) == {("0", "0", "0")}, done.log


# --- machine code ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", sampled(2, PUSH))
def test_push_has_one_fence_and_whole_vectors(kernels_of_run: CompiledKernels, kernel: str) -> None:
    """The only fence is at the entry and in no loop. Memory that peers share is accessed 16 bytes at a time."""
    code = kernels_of_run.machine_code(PUSH[kernel], 8, "bfloat16")[kernel]
    # The compiler puts one of MEMBAR.ALL.CTA in front of it where a kernel uses mailboxes.
    fences = [place for place, name in enumerate(code) if name.startswith("MEMBAR.ALL.SYS")]
    assert len(fences) == 1
    assert not [name for name in code[fences[0] + 1 :] if name.startswith("MEMBAR")]
    count = Counter(code)
    shared = [place for place, name in enumerate(code) if name.endswith("128.STRONG.SYS")]
    assert min(shared) > fences[0]
    peers, ranks = 7, 8
    # Each round has a load and a clear for each rank, where a predicate leaves out its own, and the stores that push.
    pushes, awaited = {
        "push_one_shot": (5 * peers, ranks),
        "push_two_shot": (2 * peers, 2 * ranks),
        "push_reduce_scatter": (peers, ranks),
        "push_all_gather": (peers, ranks),
        "push_add_rms_norm": (peers, ranks),
        # A vector goes to its owner; its sum goes to all, each of which waits for one owner.
        "push_two_shot_add_rms_norm": (1 + peers, ranks + 1),
        "push_moe_finalize": (peers, ranks),
    }[kernel.removesuffix("_fp8").removesuffix("_nvfp4")]
    # The compiler may take the first poll of a loop out of it.
    assert count["LDG.E.128.STRONG.SYS"] in (awaited, awaited + 1)
    assert count["STG.E.128.STRONG.SYS"] == awaited + pushes
    # The only 64-bit access of that kind stores the error word, once for each wait in the code.
    rounds = 2 if "two_shot" in kernel else 1
    assert count["STG.E.64.STRONG.SYS"] == rounds


BEFORE_FENCE = [(2, "bfloat16", 90), (8, "bfloat16", 90)]
BEFORE_FENCE += [(8, dtype, arch) for arch in ARCHS for dtype in DTYPES if (dtype, arch) != ("bfloat16", 90)]


def is_weak_load(name: str, wide: str = "") -> bool:
    """Return whether an instruction is an ordinary load of global memory; on sm_75 its name ends with ".SYS"."""
    return name.startswith(f"LDG.E{wide}") and "STRONG" not in name


@pytest.mark.parametrize(
    ("world_size", "dtype", "arch"),
    [
        pytest.param(*each, marks=() if each == (8, "bfloat16", 90) else pytest.mark.thorough)
        for each in BEFORE_FENCE
    ],
)
@pytest.mark.parametrize("kernel", PUSH)
def test_nothing_is_loaded_before_the_fence(
    kernels_of_run: CompiledKernels, kernel: str, world_size: int, dtype: str, arch: int
) -> None:
    """Behind loads in flight the fence takes twice as long."""
    code = kernels_of_run.machine_code(PUSH[kernel], world_size, dtype, arch)[kernel]
    fence = next(place for place, name in enumerate(code) if name.startswith("MEMBAR.ALL.SYS"))
    loads = [name for name in code[:fence] if name.startswith(("LD.", "LDG."))]
    assert not loads, code[:fence]
    assert any(is_weak_load(name) for name in code[fence:])


@pytest.mark.parametrize(
    ("world_size", "dtype", "arch"),
    [
        pytest.param(*each, marks=() if each == (8, "bfloat16", 90) else pytest.mark.thorough)
        for each in BEFORE_FENCE
    ],
)
@pytest.mark.parametrize("kernel", [each for each in PUSH if "norm" in each])
def test_residual_and_weight_are_loaded_before_the_poll_for_a_sum(
    kernels_of_run: CompiledKernels, kernel: str, world_size: int, dtype: str, arch: int
) -> None:
    """They come from this rank's own memory, so their time passes while the peers' data is awaited."""
    code = kernels_of_run.machine_code(PUSH[kernel], world_size, dtype, arch)[kernel]
    letters = {"LDG.E.128.STRONG": "P", "STG.E.128.STRONG": "S"}
    accesses = "".join(
        "l" if is_weak_load(name, ".128") else letters.get(name.removesuffix(".SYS"), "") for name in code
    )
    # With one shot, this rank's own input is loaded too; with two, the owner of a vector polls for its parts before.
    wanted = "llP" if "two_shot" in kernel else "lllP"
    assert accesses.count(wanted) == 1, accesses


@pytest.mark.parametrize("kernel", [*PUSH, "pull_one_shot", "pull_two_shot", "staged_all_gather"])
def test_the_next_kernel_may_begin_only_when_no_peer_is_awaited(
    kernels_of_run: CompiledKernels, kernel: str
) -> None:
    """Its blocks would otherwise take the room of a kernel that a peer needs first."""
    family = "shards" if kernel == "staged_all_gather" else PUSH.get(kernel, "pull")
    code = kernels_of_run.machine_code(family, 8, "bfloat16")[kernel]
    begins = [place for place, name in enumerate(code) if name.startswith("PREEXIT")]
    waits = [place for place, name in enumerate(code) if name.startswith("ACQBULK")]
    assert len(begins) == len(waits) == 1, code
    polls = [place for place, name in enumerate(code) if name.startswith("LDG") and "STRONG.SYS" in name]
    assert waits[0] < min(polls)
    # The first warp that comes there speaks for its block, so the block has to wait for all before.
    barriers = [place for place, name in enumerate(code) if name.startswith("BAR.SYNC")]
    assert any(max(polls) < place < begins[0] for place in barriers), code


@pytest.mark.parametrize("kernel", ["pull_one_shot", "pull_two_shot", "staged_all_gather"])
def test_pull_releases_and_acquires_in_its_two_barriers(kernels_of_run: CompiledKernels, kernel: str) -> None:
    """A release is a MEMBAR before the store, and an acquire is a CCTL.IVALL after the load."""
    family = "shards" if kernel == "staged_all_gather" else "pull"
    code = kernels_of_run.machine_code(family, 8, "bfloat16")[kernel]
    count = Counter(code)
    assert count["MEMBAR.ALL.SYS"] >= 2
    assert count["CCTL.IVALL"] >= 2
    # A rank does not read its own part of an all-gather.
    assert count["LDG.E.128.STRONG.SYS"] >= (7 if kernel == "staged_all_gather" else 8)


@pytest.mark.parametrize(
    ("arch", "world_size", "dtype"),
    [(90, 8, "bfloat16"), (90, 2, "float32"), (100, 8, "float16"), (103, 2, "bfloat16"), (120, 8, "float32")],
)
def test_multimem_fences_between_the_two_addresses_of_its_memory(
    kernels_of_run: CompiledKernels, arch: int, world_size: int, dtype: str
) -> None:
    """Behind each barrier, and before the first access by the other address, stands a proxy fence of every thread."""
    check = kernels_of_run.compiled(KernelVariant(arch, world_size, dtype, "multimem"))
    assert set(USAGE.findall(check.log)) == {("0", "0", "0")}, check.log
    code = kernels_of_run.machine_code("multimem", world_size, dtype, arch)["multimem_two_shot"]
    sums = [place for place, name in enumerate(code) if name.startswith("LDGMC")]
    assert len(sums) == 5
    # float32 is added in float32, halves with at least that precision (".acc::f32").
    wanted = {"float32": ("ADD.F32x4",), "float16": ("F32ADD.F16x8", "HPADD.F16x8")}
    wanted["bfloat16"] = ("F32ADD.BF16x8", "HPADD.BF16x8")
    assert all(any(f".{each}.RN.STRONG.SYS" in code[place] for each in wanted[dtype]) for place in sums)
    # fence.proxy.alias is a MEMBAR.SC of the GPU or of the system, as the driver says at run time, then CCTL.IVALL.
    proxy = [place for place, name in enumerate(code) if name == "MEMBAR.SC.SYS"]
    assert len(proxy) == 2
    assert [code[place + 1] for place in proxy] == ["CCTL.IVALL"] * 2
    staged, stored, read = (
        [place for place, name in enumerate(code) if name == kind and (place < sums[0]) == is_early]
        for kind, is_early in (
            ("STG.E.128.STRONG.SYS", True),
            ("STG.E.128.STRONG.SYS", False),
            ("LDG.E.128.STRONG.SYS", False),
        )
    )
    assert len(staged) == len(read) == world_size
    assert len(stored) == len(sums)
    barriers = [place for place, name in enumerate(code) if name.startswith("BAR.SYNC")]
    flags = [place for place, name in enumerate(code) if name == "MEMBAR.ALL.SYS"]
    first, second = proxy
    assert max(staged) < flags[0] < max(each for each in barriers if each < first) < first < min(sums)
    assert max(stored) < max(each for each in flags if each < second)
    assert max(stored) < max(each for each in barriers if each < second) < second < min(read)
    begins = [place for place, name in enumerate(code) if name.startswith("PREEXIT")]
    assert len(begins) == 1
    assert begins[0] > max(read)


@pytest.mark.parametrize(
    ("arch", "world_size", "dtype"),
    [(90, 8, "bfloat16"), (90, 2, "float32"), (100, 8, "float16"), (120, 8, "float32")],
)
def test_one_shot_multimem_stores_nothing_at_the_address_of_all(
    kernels_of_run: CompiledKernels, arch: int, world_size: int, dtype: str
) -> None:
    """Between its two fenced barriers a rank only asks for sums, and stores them in memory of its own."""
    code = kernels_of_run.machine_code("multimem", world_size, dtype, arch)["multimem_one_shot"]
    sums = [place for place, name in enumerate(code) if name.startswith("LDGMC")]
    assert len(sums) == 5
    # What is staged is the only strong store of a whole vector.
    staged = [place for place, name in enumerate(code) if name == "STG.E.128.STRONG.SYS"]
    assert staged
    first, second = (place for place, name in enumerate(code) if name == "MEMBAR.SC.SYS")
    assert [code[place + 1] for place in (first, second)] == ["CCTL.IVALL"] * 2
    flags = [place for place, name in enumerate(code) if name == "MEMBAR.ALL.SYS"]
    barriers = [place for place, name in enumerate(code) if name.startswith("BAR.SYNC")]
    assert max(staged) < flags[0] < max(each for each in barriers if each < first) < first < min(sums)
    assert max(sums) < max(each for each in barriers if each < second) < second
    begins = [place for place, name in enumerate(code) if name.startswith("PREEXIT")]
    assert len(begins) == 1
    assert begins[0] > second


def test_only_newer_devices_get_multimem(kernels_of_run: CompiledKernels) -> None:
    """Other families have no such instruction, and the module is refused for older devices."""
    with pytest.raises(CapabilityError, match=r"compute capability 9\.0, this GPU has 8\.9"):
        KernelVariant(89, 2, "float32", "multimem")
    listed = kernels_of_run.machine_code("pull", 2, "float32")
    assert not [name for code in listed.values() for name in code if "LDGMC" in name]
    source = kernels.kernel_source()
    # Not even a build without families contains it for them.
    assert source.count("(defined(GC_HOST_BUILD) || __CUDA_ARCH__ >= 900)") == 1


@pytest.mark.parametrize("kernel", ["expert_dispatch", "expert_combine"])
def test_an_exchange_of_experts_orders_its_rows_by_flags_alone(
    kernels_of_run: CompiledKernels, kernel: str
) -> None:
    """One release stores the flags and each load of one acquires; rows move 16 bytes at a time by weak accesses."""
    code = kernels_of_run.machine_code("expert", 8, "bfloat16")[kernel]
    release = [place for place, name in enumerate(code) if name == "MEMBAR.ALL.SYS"]
    assert len(release) == 1
    count = Counter(code)
    assert count["STG.E.STRONG.SYS"] == 1
    # The polls of eight ranks' flags.
    assert count["CCTL.IVALL"] >= 8
    # Of rows, the push is before the release. No row is a signal, so none needs a strong access.
    pushed = [place for place, name in enumerate(code) if name == "STG.E.128"]
    assert pushed
    assert min(pushed) < release[0]
    assert not [name for name in code if "128.STRONG" in name]
    # A load that may be cached as constant would not see what peers stored.
    assert not [name for name in code if name.startswith("LDG") and "CONSTANT" in name]


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [(8, "bfloat16"), *(pytest.param(2, each, marks=pytest.mark.thorough) for each in DTYPES)],
)
def test_no_sum_uses_a_multiply_add(kernels_of_run: CompiledKernels, world_size: int, dtype: str) -> None:
    """A multiply-add rounds once where the contract rounds twice. Only division and root use it inside."""
    for family in ("one_shot", "two_shot", "shards", "pull"):
        for kernel, code in kernels_of_run.machine_code(family, world_size, dtype).items():
            assert not [name for name in code if re.match(r"[FHD]FMA|HADD2\.BF16|HMUL2", name)], kernel
    for kernel, code in kernels_of_run.machine_code("expert", world_size, dtype).items():
        # All its sums are of float32; HFMA2.MMA with zeros as factors loads a constant.
        assert not [name for name in code if name.startswith("FFMA")], kernel
    for kernel, code in kernels_of_run.machine_code("norm", world_size, dtype).items():
        fused = [name for name in code if name.startswith("FFMA")]
        # Mean, root and reciprocal are three short sequences, however many elements a vector has.
        assert 0 < len(fused) < 50, kernel


# --- layout ---------------------------------------------------------------------------------------------------


def test_python_and_the_kernels_hold_the_same_numbers() -> None:
    """The constants of the source equal those of kernel_layout."""
    source = kernels.kernel_source()
    wanted = {
        "MAX_BLOCKS": kernel_layout.MAX_BLOCKS,
        "FLAG_LINE_BYTES": kernel_layout.LINE_BYTES,
        "ABORT_OFFSET": kernel_layout.ABORT_OFFSET,
        "GROUP_LANES": kernel_layout.GROUP_LANES,
        "NORM_GROUPS": kernel_layout.NORM_GROUPS,
        "WARP": kernel_layout.WARP,
    }
    for name, value in wanted.items():
        assert re.search(rf"constexpr u(32|64) {name} = {value};", source), name
    assert f"sizeof(Params) == {PARAMS_BYTES}" in source
    numbers = re.search(r"enum Kernel : u32 \{\s*(.*?)\s*\}", source, re.DOTALL)
    assert numbers is not None
    names = [each.split("=")[0].strip().lower() for each in numbers[1].split(",")]
    assert tuple(names) == ALGORITHMS
    for number, family in enumerate(FAMILIES, 1):
        assert f"#define FAMILY_{family.upper()} {number}\n" in source
    compiled = {name for names in FAMILIES.values() for name in names}
    assert compiled == set(kernel_layout.KERNEL_NAMES[1:])


# `norm_arena` says what the two-shot norm takes, which depends on its rows.
@pytest.mark.parametrize("algorithm", [each for each in ALGORITHMS if "two_shot_add" not in each])
@pytest.mark.parametrize("world_size", [2, 3, 7, 8])
def test_the_largest_input_fits_and_one_more_does_not(algorithm: str, world_size: int) -> None:
    """`largest_input` is the inverse of what a call requires."""
    layout = kernel_layout.WorkspaceLayout(world_size, 1 << 20, 4096)
    most = kernel_layout.largest_input(algorithm, layout)
    assert most > 0
    if algorithm == "multimem_two_shot":
        # Every rank has the same number of whole vectors in the memory of all.
        assert most % (world_size * kernel_layout.VECTOR_BYTES) == 0
        assert layout.staging_bytes - world_size * kernel_layout.VECTOR_BYTES < most <= layout.staging_bytes
    elif algorithm in ("staged_all_gather", "multimem_one_shot"):
        assert most == layout.staging_bytes
    elif algorithm.startswith("pull"):
        assert required_staging(most) == layout.staging_bytes
        assert layout.results_bytes * world_size >= most
    else:
        assert required_arena(algorithm, most, world_size) <= layout.arena_bytes
        assert required_arena(algorithm, most + 128, world_size) > layout.arena_bytes
    assert layout.total_bytes == layout.results_offset + layout.results_bytes


def test_what_cannot_be_right_is_refused() -> None:
    """What does not fit, and what there are no kernels for, is named."""
    layout = kernel_layout.WorkspaceLayout(2, 1 << 20)
    for deadline_ns in (0, 2**63):
        with pytest.raises(UsageError, match="deadline_ns"):
            kernel_layout.pack_params(
                layout, workspaces=[0, 0], state=0, error=0, deadline_ns=deadline_ns, rank=0
            )
    for sizes in ((100, 0), (-128, 0), (128, 64)):
        with pytest.raises(UsageError, match="must be a multiple of 128"):
            kernel_layout.WorkspaceLayout(2, *sizes)
    with pytest.raises(UsageError, match=r"no kernel 'nope', only push_one_shot"):
        kernels.family_of("nope")
    with pytest.raises(UsageError, match="float64"):
        KernelVariant(90, 2, "float64", "one_shot")
    with pytest.raises(CapabilityError, match=r"7\.5"):
        KernelVariant(70, 2, "float32", "pull")
    with pytest.raises(CapabilityError, match="sm_999"):
        compile_kernels(KernelVariant(999, 2, "float32", "one_shot"))


# --- cache ----------------------------------------------------------------------------------------------------

ONE_SHOT = KernelVariant(90, 2, "float32", "one_shot")


@pytest.fixture(name="cache_directory")
def a_directory(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "cache"


def test_the_second_start_compiles_nothing(cache_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on disk is used as it is, by any process."""
    first = KernelCache(cache_directory).cubin(ONE_SHOT)
    monkeypatch.setattr(kernels, "compile_kernels", None)
    assert KernelCache(cache_directory).cubin(ONE_SHOT) == first
    assert [path.stat().st_mode & 0o777 for path in cache_directory.iterdir()] == [0o600]
    assert cache_directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-7], lambda data: data[:60] + b"x" + data[61:], lambda _: b""]
)
def test_a_damaged_file_is_rebuilt(cache_directory: Path, damage: Callable[[bytes], bytes]) -> None:
    """Each read of a file verifies its checksum; a damaged file is compiled again."""
    cache_ = KernelCache(cache_directory)
    first = cache_.cubin(ONE_SHOT)
    path = cache_.path_of(ONE_SHOT)
    path.write_bytes(damage(path.read_bytes()))
    assert cache_.cubin(ONE_SHOT) == first
    assert kernels._read(path) == first


def test_a_planted_link_is_not_followed(cache_directory: Path, tmp_path: Path) -> None:
    """A symbolic link in the cache is replaced, and its target is left alone."""
    cache_ = KernelCache(cache_directory)
    target = tmp_path / "target"
    target.write_bytes(b"mine")
    cache_.path_of(ONE_SHOT).symlink_to(target)
    assert cache_.cubin(ONE_SHOT)[:4] == b"\x7fELF"
    assert target.read_bytes() == b"mine"
    assert not cache_.path_of(ONE_SHOT).is_symlink()


def test_an_open_directory_is_refused(tmp_path: Path) -> None:
    """Machine code is read only from a directory in which no other user can write."""
    tmp_path.chmod(0o755)
    with pytest.raises(CapabilityError, match="mode 0700"):
        KernelCache(tmp_path)
    tmp_path.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(CapabilityError, match="not a link"):
        KernelCache(link)
    (tmp_path / "file").touch()
    with pytest.raises(CapabilityError, match="no kernel cache"):
        KernelCache(tmp_path / "file")


def test_ranks_that_start_together_agree(cache_directory: Path) -> None:
    """All ranks compile and write the same file, and none reads half a file."""
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: KernelCache(cache_directory).cubin(ONE_SHOT), range(4)))
    assert len(set(found)) == 1
    assert len(list(cache_directory.iterdir())) == 1


def test_the_cache_is_bounded(cache_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache removes the files that were written first."""
    monkeypatch.setattr(kernels, "MOST_FILES", 3)
    monkeypatch.setattr(kernels, "compile_kernels", lambda _: kernels.Compiled(b"code", ""))
    cache_ = KernelCache(cache_directory)
    variants = [KernelVariant(90, size, "float32", "one_shot") for size in range(2, 8)]
    for variant in variants:
        cache_.cubin(variant)
        os.utime(cache_.path_of(variant), ns=(variant.world_size, variant.world_size))
    assert {path.name for path in cache_directory.iterdir()} == {
        cache_.path_of(each).name for each in variants[-3:]
    }


def test_every_fact_is_in_the_key(cache_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each architecture, world size, dtype, family, emulation, source and compiler has a file of its own."""
    cache_ = KernelCache(cache_directory)
    variants = [
        KernelVariant(90, 2, "float32", "pull"),
        KernelVariant(100, 2, "float32", "pull"),
        KernelVariant(90, 3, "float32", "pull"),
        KernelVariant(90, 2, "float16", "pull"),
        KernelVariant(90, 2, "float32", "norm"),
        KernelVariant(90, 2, "float32", "pull", emulate=True),
    ]
    paths = {cache_.path_of(each) for each in variants}
    monkeypatch.setattr(kernels, "kernel_source", lambda: "other")
    paths.add(cache_.path_of(variants[0]))
    monkeypatch.setattr(kernels, "_compiler_identity", lambda: "other")
    paths.add(cache_.path_of(variants[0]))
    assert len(paths) == len(variants) + 2


@pytest.mark.parametrize(
    ("arch", "target"), [(103, 100), (121, 120), (89, 86), (90, 90), (87, 87), (110, 110)]
)
def test_an_architecture_that_the_compiler_does_not_know_gets_the_next_older_code(
    arch: int, target: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its device runs that, so it does not lose our kernels to an older compiler."""
    call = kernels._call

    def older(function: str, *arguments: object) -> object:
        return known if function == "nvrtcGetSupportedArchs" else call(function, *arguments)

    known = [75, 80, 86, 87, 90, 100, 110, 120]
    monkeypatch.setattr(kernels, "_call", older)
    variant = KernelVariant(arch, 2, "float32", "pull")
    assert compile_kernels(variant).cubin == compile_kernels(dataclasses.replace(variant, arch=target)).cubin
    for other in (101, 112):
        with pytest.raises(CapabilityError, match=f"compiles nothing for sm_{other}"):
            compile_kernels(dataclasses.replace(variant, arch=other))


def test_the_error_contains_the_compilers_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that does not compile raises an error that shows the compiler's output."""
    monkeypatch.setattr(kernels, "kernel_source", lambda: "this is no program")
    with pytest.raises(CudaError, match="error: ") as caught:
        compile_kernels(ONE_SHOT)
    assert caught.value.function == "nvrtcCompileProgram"
    assert "NVRTC" in caught.value.library


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NVIDIA's bindings the error says which package is missing."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(CapabilityError, match="cuda-bindings") as caught:
        compile_kernels(ONE_SHOT)
    assert caught.value.requirement == "cuda-python"
