"""The kernels run as threads and are compared with torch: every rank gets the same bits with every algorithm."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from device_comm.cuda import kernel_layout
from device_comm.cuda.kernel_layout import KernelFailure, WorkspaceLayout
from tests.fake_multicast import Window
from tests.kernel_memory import ALGORITHMS, PARAMS_BYTES
from tests.native.cuda.host_build import HostKernels, build_host_library, shared_folder
from tests.waiting import wait_until

SUMS = ("push_one_shot", "push_two_shot", "pull_one_shot", "pull_two_shot")
# Sizes around those of vectors, shards and the grid, where a piece could be cut wrongly.
SIZES = (
    *range(1, 20),
    23,
    24,
    25,
    31,
    32,
    33,
    40,
    47,
    56,
    63,
    64,
    65,
    72,
    96,
    100,
    127,
    128,
    129,
    200,
    255,
    256,
)
# A library and its tests take five seconds of processor time, so the normal suite leaves out two world sizes.
VARIANTS = [
    (2, "float32"),
    (3, "float16"),
    (4, "bfloat16"),
    pytest.param((5, "float32"), marks=pytest.mark.thorough),
    pytest.param((6, "float16"), marks=pytest.mark.thorough),
    (7, "bfloat16"),
    (8, "float32"),
]
SECOND = 1_000_000_000
FLOAT32_NAN, HALF_NAN = 0x7FFFFFFF, 0x7FFF


class Group:
    """All ranks of a group in one process: their workspaces, states, error records and parameters."""

    def __init__(self, kernels: HostKernels, world_size: int, dtype: torch.dtype, deadline_ns: int) -> None:
        self.kernels, self.world_size, self.dtype = kernels, world_size, dtype
        self.layout = WorkspaceLayout(world_size, 128 * 1024, 4096)
        self.workspaces = [self.aligned(self.layout.total_bytes) for _ in range(world_size)]
        for workspace in self.workspaces:
            for offset, value, words in self.layout.initial_words:
                ctypes.memset(workspace + offset, value & 0xFF, 4 * words)
        self.states = [self.aligned(kernel_layout.STATE_BYTES) for _ in range(world_size)]
        self.errors = [self.aligned(kernel_layout.ERROR_RECORD_BYTES) for _ in range(world_size)]
        self.params = [
            kernel_layout.pack_params(
                self.layout,
                workspaces=self.workspaces,
                state=self.states[rank],
                error=self.errors[rank],
                deadline_ns=deadline_ns,
                rank=rank,
            )
            for rank in range(world_size)
        ]
        own = [self.aligned(self.layout.staging_bytes) for _ in range(world_size)]
        self.window = Window(own, self.layout.staging_bytes)
        self.areas = [kernel_layout.pack_area(each, self.window.address) for each in own]

    def aligned(self, nbytes: int) -> int:
        """Return the address of zeroed memory that lives as long as the group."""
        self.__dict__.setdefault("kept", []).append(torch.zeros(nbytes + 256, dtype=torch.uint8))
        return (self.kept[-1].data_ptr() + 127) // 128 * 128  # type: ignore[attr-defined, no-any-return]

    def on_all(self, work: Callable[[int], None], ranks: Sequence[int] | None = None) -> None:
        """Run `work` as every rank at once."""
        problems: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                work(rank)
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks or range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []

    def launch(self, rank: int, kernel: str, first: int, *rest: object, grid: int = 2) -> None:
        """Launch a kernel of one rank. `first` is the address of the input or of the table of inputs."""
        fixed = [self.params[rank], *([self.areas[rank]] if kernel.startswith("multimem") else [])]
        self.kernels.launch(kernel, grid, 2, [*fixed, ctypes.c_uint64(first), *rest])

    def failure(self, rank: int) -> KernelFailure | None:
        """Return the failure that the rank's error record holds, or None."""
        return kernel_layout.read_failure(
            ctypes.string_at(self.errors[rank], kernel_layout.ERROR_RECORD_BYTES)
        )


def empty(shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return memory with torch's alignment, which is at least 16 bytes."""
    return torch.empty(shape, dtype=dtype)


def random_words(shape: int | tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return values many of which are special: NaN, -0, infinities, denormals, any bits and the sentinel."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    values = (torch.randn(shape, generator=generator) * 100).to(dtype)
    special = torch.tensor([-1, 0, 1, torch.iinfo(bits).min], dtype=bits)
    special = torch.cat(
        [special, torch.tensor([float("inf"), -float("inf"), float("nan")]).to(dtype).view(bits)]
    )
    chosen = special[torch.randint(0, len(special), values.shape, generator=generator)]
    anything = torch.randint(-(2**31), 2**31 - 1, values.shape, generator=generator).to(bits)
    kind = torch.randint(0, 8, values.shape, generator=generator)
    return torch.where(kind == 0, chosen, torch.where(kind == 1, anything, values.view(bits))).view(dtype)


def canonical(values: torch.Tensor) -> torch.Tensor:
    """Return the bits; every NaN has the bits that the kernels write."""
    wide = values.dtype is torch.float32
    bits = values.view(torch.int32 if wide else torch.int16).clone()
    bits[values.isnan()] = FLOAT32_NAN if wide else HALF_NAN
    return bits


def raw(values: torch.Tensor) -> torch.Tensor:
    """Return the bits as they are."""
    return values.view(torch.int32 if values.dtype is torch.float32 else torch.int16)


def sum_in_rank_order(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the reference, which is the float32 sum in rank order, rounded once."""
    total = inputs[0].float()
    for each in inputs[1:]:
        total = total + each.float()
    return total.to(inputs[0].dtype)


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda each: f"{each[0]}-{each[1]}")
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Group:
    """Return a group. The groups have every world size, and each dtype occurs at least twice."""
    world_size, dtype = request.param
    library = build_host_library(world_size, dtype, shared_folder(tmp_path_factory))
    return Group(HostKernels(library), world_size, getattr(torch, dtype), 60 * SECOND)


def test_every_sum_has_the_bits_of_the_reference(group: Group) -> None:
    """All four algorithms give all ranks the same result at all sizes, in turn on the same workspace."""
    inputs = [
        [random_words(size, group.dtype, 100 * size + r) for r in range(group.world_size)] for size in SIZES
    ]
    wanted = [canonical(sum_in_rank_order(each)) for each in inputs]
    addresses = [torch.tensor([each.data_ptr() for each in row]) for row in inputs]

    def work(rank: int) -> None:
        for place, size in enumerate(SIZES):
            for kernel in SUMS:
                out = empty(size, group.dtype)
                table = addresses[place].data_ptr()
                first = table if kernel.startswith("pull") else inputs[place][rank].data_ptr()
                arguments = ctypes.c_uint64(out.data_ptr()), ctypes.c_uint64(size)
                group.launch(rank, kernel, first, *arguments, grid=1 + size % 2)
                assert torch.equal(raw(out), wanted[place]), (kernel, rank, size)

    group.on_all(work)
    assert [group.failure(rank) for rank in range(group.world_size)] == [None] * group.world_size


@pytest.mark.guarantee("D83")
def test_multimem_sums_are_equal_on_all_ranks_and_near_the_exact_sum(group: Group) -> None:
    """The host build draws another order for each sum. Any words give all ranks the same bits."""
    most = kernel_layout.largest_input("multimem_two_shot", group.layout)
    sizes = [*SIZES, most // group.dtype.itemsize]
    finite = torch.Generator().manual_seed(7)
    inputs, results = [], []
    for number, size in enumerate(sizes):
        shape = (group.world_size, size)
        is_finite = number % 2 == 0
        ordinary = (torch.randn(shape, generator=finite) * 100).to(group.dtype)
        inputs.append(ordinary if is_finite else random_words(shape, group.dtype, size))
        results.append(torch.empty(shape, dtype=group.dtype))

    def work(rank: int) -> None:
        for place, size in enumerate(sizes):
            out = results[place][rank]
            in_place = place % 3 == 0
            buffer = inputs[place][rank].clone() if in_place else empty(size, group.dtype)
            first = buffer if in_place else inputs[place][rank].clone()
            arguments = ctypes.c_uint64(buffer.data_ptr()), ctypes.c_uint64(size)
            group.launch(rank, "multimem_two_shot", first.data_ptr(), *arguments, grid=1 + size % 2)
            out.copy_(buffer)

    group.on_all(work)
    assert [group.failure(rank) for rank in range(group.world_size)] == [None] * group.world_size
    for place, found in enumerate(results):
        assert torch.equal(raw(found), raw(found[:1]).expand(found.shape)), sizes[place]
        if place % 2 == 0:
            expect_near(found[0], inputs[place])


def expect_near(found: torch.Tensor, inputs: torch.Tensor) -> None:
    """Allow one rounding to the dtype, and for each addition one to float32."""
    exact, terms = inputs.double().sum(0), inputs.double().abs().sum(0)
    bound = torch.finfo(found.dtype).eps * exact.abs() + len(inputs) * 2.0**-24 * terms
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.guarantee("D83")
def test_one_shot_multimem_sums_are_near_the_exact_sum_but_not_equal_on_all_ranks(group: Group) -> None:
    """Each rank asks for each sum, and the host build draws another order for each request."""
    most = kernel_layout.largest_input("multimem_one_shot", group.layout)
    assert most == group.layout.staging_bytes
    sizes = [*SIZES, most // group.dtype.itemsize]
    generator = torch.Generator().manual_seed(11)
    inputs = [
        (torch.randn((group.world_size, size), generator=generator) * 100).to(group.dtype) for size in sizes
    ]
    results = [torch.empty_like(each) for each in inputs]

    def work(rank: int) -> None:
        for place, size in enumerate(sizes):
            buffer = inputs[place][rank].clone()
            out = buffer if place % 3 == 0 else empty(size, group.dtype)
            arguments = ctypes.c_uint64(out.data_ptr()), ctypes.c_uint64(size)
            group.launch(rank, "multimem_one_shot", buffer.data_ptr(), *arguments, grid=1 + size % 2)
            results[place][rank] = out

    group.on_all(work)
    assert [group.failure(rank) for rank in range(group.world_size)] == [None] * group.world_size
    for place, found in enumerate(results):
        for rank in range(group.world_size):
            expect_near(found[rank], inputs[place])
    if group.dtype is torch.float32 and group.world_size > 2:
        # Why the form must be asked for: an order of its own per rank shows in the last bits.
        assert not torch.equal(raw(results[-1]), raw(results[-1][:1]).expand(results[-1].shape))


def test_reduce_scatter_has_the_bits_of_the_sum(group: Group) -> None:
    """Shards may have any number of elements and need not begin at a multiple of 16 bytes."""
    sizes = (1, 3, 4, 7, 8, 9, 16, 33, 64)
    inputs = [
        [random_words(size * group.world_size, group.dtype, size + r) for r in range(group.world_size)]
        for size in sizes
    ]
    wanted = [canonical(sum_in_rank_order(each)) for each in inputs]

    def work(rank: int) -> None:
        for place, size in enumerate(sizes):
            out = empty(size, group.dtype)
            arguments = ctypes.c_uint64(out.data_ptr()), ctypes.c_uint64(size)
            group.launch(rank, "push_reduce_scatter", inputs[place][rank].data_ptr(), *arguments)
            assert torch.equal(raw(out), wanted[place][rank * size : (rank + 1) * size]), (rank, size)

    group.on_all(work)


@pytest.mark.parametrize("kernel", ["push_all_gather", "staged_all_gather"])
def test_all_gather_moves_any_bytes(group: Group, kernel: str) -> None:
    """It gathers any number of bytes at any address. A byte may be -1: flags, if any, travel beside the data."""
    cases = [(nbytes, shift) for nbytes in (1, 2, 5, 8, 13, 16, 24, 64, 200, 1600) for shift in (0, 1, 4)]
    inputs = [
        [
            torch.randint(
                0, 256, (nbytes + 8,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes + r)
            )
            | (255 if r == 1 else 0)
            for r in range(group.world_size)
        ]
        for nbytes, _ in cases
    ]

    def work(rank: int) -> None:
        for place, (nbytes, shift) in enumerate(cases):
            out = torch.zeros(group.world_size * nbytes + 8, dtype=torch.uint8)
            first = inputs[place][rank].data_ptr() + shift
            arguments = ctypes.c_uint64(out.data_ptr() + shift), ctypes.c_uint64(nbytes)
            group.launch(rank, kernel, first, *arguments)
            wanted = torch.cat([each[shift : shift + nbytes] for each in inputs[place]])
            assert torch.equal(out[shift : shift + len(wanted)], wanted), (rank, nbytes, shift)
            assert not out[:shift].any()
            assert not out[shift + len(wanted) :].any()

    group.on_all(work)


def norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, ...]:
    """Return (out, residual_out) as DESIGN.md defines them, computed by torch alone."""
    sums = (x.float() + residual.float()).to(x.dtype)
    rows, hidden = sums.shape
    elements = 16 // x.itemsize
    vectors = sums.float().view(rows, hidden // elements, elements)
    padding = -vectors.shape[1] % 1024
    squares = torch.nn.functional.pad(vectors * vectors, (0, 0, 0, padding)).view(rows, -1, 4, 256, elements)
    lanes = torch.zeros(rows, 4, 256)
    for turn in range(squares.shape[1]):
        for element in range(elements):
            lanes = lanes + squares[:, turn, :, :, element]
    while lanes.shape[2] > 1:
        half = lanes.shape[2] // 2
        lanes = lanes[:, :, :half] + lanes[:, :, half:]
    mean = ((lanes[:, 0] + lanes[:, 2]) + (lanes[:, 1] + lanes[:, 3])) / torch.tensor(float(hidden))
    # numpy rounds the root correctly; torch on the CPU does not for one float in six.
    root = torch.from_numpy(np.sqrt((mean + torch.tensor(eps, dtype=torch.float32)).numpy()))
    scale = torch.tensor(1.0) / root
    return (sums.float() * scale * weight.float()).to(x.dtype), sums


@pytest.mark.parametrize("cluster", [1, 2, 4])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (3, 128), (2, 2560), (1, 4096)])
def test_the_fused_norm_has_the_bits_of_its_parts(group: Group, rows: int, hidden: int, cluster: int) -> None:
    """Both fused kernels, the norm alone after an all-reduce, and the definition give one result."""
    if rows * hidden * group.dtype.itemsize * group.world_size > group.layout.arena_bytes:
        rows = 1
    # The kernel relies on its caller for this; it would write behind the workspace.
    assert rows * hidden * group.dtype.itemsize * group.world_size <= group.layout.arena_bytes
    shape = (rows, hidden)
    finite = torch.Generator().manual_seed(hidden)
    inputs = [torch.randn(shape, generator=finite).to(group.dtype) for _ in range(group.world_size)]
    residual = torch.randn(shape, generator=finite).to(group.dtype)
    weight = torch.randn(hidden, generator=finite).to(group.dtype)
    reduced = sum_in_rank_order(inputs)
    out_wanted, residual_wanted = norm_reference(reduced, residual, weight, 1e-5)

    def run(rank: int, kernel: str, x: torch.Tensor) -> None:
        out, residual_out = empty(shape, group.dtype), empty(shape, group.dtype)
        tensors = [ctypes.c_uint64(each.data_ptr()) for each in (residual, weight, out, residual_out)]
        rest = [*tensors, ctypes.c_uint32(rows), ctypes.c_uint32(hidden), ctypes.c_float(1e-5)]
        arguments = [ctypes.c_uint64(x.data_ptr()), *rest]
        if kernel != "add_rms_norm":
            arguments = [group.params[rank], *arguments]
        group.kernels.launch(kernel, 2 * cluster, 2, arguments, cluster)
        assert torch.equal(raw(residual_out), raw(residual_wanted)), kernel
        assert torch.equal(raw(out), raw(out_wanted)), kernel

    group.on_all(lambda rank: run(rank, "push_add_rms_norm", inputs[rank]))
    group.on_all(lambda rank: run(rank, "push_two_shot_add_rms_norm", inputs[rank]))
    run(0, "add_rms_norm", reduced)
    exact = torch.nn.functional.rms_norm(residual_wanted.float(), (hidden,), weight.float(), 1e-5)
    assert torch.allclose(
        out_wanted.float(), exact, rtol=2**-7 if group.dtype is not torch.float32 else 1e-5, atol=1e-6
    )


# --- failure --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(build_host_library(3, "bfloat16", shared_folder(tmp_path_factory)))


def call(group: Group, rank: int, kernel: str) -> None:
    """Launch `kernel` with an input of 64 elements."""
    source, out = torch.ones(1024, dtype=group.dtype), empty(1024, group.dtype)
    table = torch.tensor([source.data_ptr()] * group.world_size)
    first = table.data_ptr() if kernel.startswith("pull") else source.data_ptr()
    second, result = ctypes.c_uint64(source.data_ptr()), ctypes.c_uint64(out.data_ptr())
    if "add_rms_norm" in kernel:
        rest: list[object] = [second, second, result, result]
        rest += [ctypes.c_uint32(1), ctypes.c_uint32(64), ctypes.c_float(1.0)]
        # The scales of an output of 8 or 4 bits.
        rest += [second, result] if kernel.endswith(("fp8", "fp4")) else []
    elif kernel == "push_moe_finalize":
        rest = [second, second, second, result, *map(ctypes.c_uint32, (1, 64, 1, 1))]
    else:
        rest = [result, ctypes.c_uint64(64)]
    group.launch(rank, kernel, first, *rest)


@pytest.mark.parametrize("kernel", ALGORITHMS)
def test_a_deadline_names_the_rank_that_did_not_come(three: HostKernels, kernel: str) -> None:
    """Each rank that waits for rank 1 names it, also if it waits through others; later launches return at once."""
    # Not less: on a busy machine rank 2 begins later than rank 0, which must not name it.
    group = Group(three, 3, torch.bfloat16, SECOND // 4)
    group.on_all(lambda rank: call(group, rank, kernel), ranks=[0, 2])
    for rank in (0, 2):
        assert group.failure(rank) == KernelFailure(
            "deadline", kernel, (1,), int(kernel.startswith(("pull", "multimem", "staged")))
        )
    # The state is poisoned: a launch returns at once, long before another deadline, and keeps the first failure.
    group.params[0] = group.params[0][:80] + (3600 * SECOND).to_bytes(8, "little") + group.params[0][88:]
    call(group, 0, kernel)
    failure = group.failure(0)
    assert failure is not None
    assert failure.missing == (1,)


@pytest.mark.parametrize("kernel", ["push_two_shot", "push_all_gather", "pull_one_shot"])
def test_an_abort_ends_the_wait(three: HostKernels, kernel: str) -> None:
    """The host's abort word ends a kernel that would wait for an hour; the kernel names the rank it waited for."""
    group = Group(three, 3, torch.bfloat16, 3600 * SECOND)
    waiting = threading.Thread(target=call, args=(group, 2, kernel))

    def workspace_of_rank_0() -> bytes:
        return ctypes.string_at(group.workspaces[0], group.layout.total_bytes)

    before = workspace_of_rank_0()
    waiting.start()
    # A kernel tells the other ranks that it has come before it waits for them.
    wait_until(lambda: workspace_of_rank_0() != before, "the kernel to come", 20.0)
    time.sleep(0.05)  # long enough for a kernel that does not wait to return
    assert waiting.is_alive()
    ctypes.c_uint32.from_address(group.errors[2] + kernel_layout.ABORT_OFFSET).value = 1
    waiting.join(20)
    assert not waiting.is_alive()
    failure = group.failure(2)
    assert failure is not None
    assert failure.reason == "aborted"
    assert failure.missing in {(0, 1), (0,), (1,)}


def test_the_host_build_knows_its_parameters(three: HostKernels) -> None:
    """The structure has the size that Python packs."""
    assert three.library.params_bytes() == PARAMS_BYTES
