"""The fused kernels run as threads and are compared with torch: 8-bit norms, and the sums of experts."""

from __future__ import annotations

import ctypes

import pytest
import torch

from device_comm.cuda import kernel_layout
from device_comm.fused.finalize import finalized
from device_comm.fused.fp4 import blocks_quantised
from device_comm.fused.fp8 import SMALLEST_SCALE, quantised_rows
from device_comm.fused.rms_norm import add_rms_norm
from tests.native.cuda.host_build import HostKernels, build_host_library, shared_folder
from tests.native.cuda.test_kernel_results import (
    SECOND,
    VARIANTS,
    Group,
    canonical,
    empty,
    random_words,
    raw,
    sum_in_rank_order,
)

EPS = 1e-5
NULL = ctypes.c_uint64(0)


# Eight ranks with bfloat16 are what production uses most; both pairs join the slow tests.
MORE = [pytest.param((size, "bfloat16"), marks=pytest.mark.thorough) for size in (2, 8)]


@pytest.fixture(scope="module", params=[*VARIANTS, *MORE], ids=lambda each: f"{each[0]}-{each[1]}")
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Group:
    """Return a group. The groups have every world size, and each dtype occurs at least twice."""
    world_size, dtype = request.param
    library = build_host_library(world_size, dtype, shared_folder(tmp_path_factory))
    return Group(HostKernels(library), world_size, getattr(torch, dtype), 60 * SECOND)


@pytest.fixture(scope="module", params=["float32", "float16", "bfloat16"])
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Group:
    """Return a group of each dtype, for kernels that do not communicate."""
    world_size = {"float32": 2, "float16": 3, "bfloat16": 4}[request.param]
    library = build_host_library(world_size, request.param, shared_folder(tmp_path_factory))
    return Group(HostKernels(library), world_size, getattr(torch, request.param), SECOND)


def address(tensor: torch.Tensor | None) -> ctypes.c_uint64:
    return NULL if tensor is None else ctypes.c_uint64(tensor.data_ptr())


class Norm:
    """The arguments and the expected results of a norm with 8-bit output."""

    def __init__(
        self,
        group: Group,
        reduced: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor | None,
        eps: float = EPS,
    ) -> None:
        self.group, self.residual, self.weight, self.scale, self.eps = group, residual, weight, scale, eps
        self.rows, self.hidden = reduced.shape
        normed, self.total = add_rms_norm(reduced, residual, weight, eps)
        self.quantised, self.scales = quantised_rows(normed, scale)

    def check(self, kernel: str, x: torch.Tensor, rank: int = 0, cluster: int = 1) -> None:
        """Run a kernel as one rank and compare every bit."""
        group = self.group
        out, total = torch.empty(x.shape, dtype=torch.uint8), empty(tuple(x.shape), group.dtype)
        scales = torch.full((self.rows, 1), -1.0)
        arguments: list[object] = [address(each) for each in (x, self.residual, self.weight, out, total)]
        sizes = ctypes.c_uint32(self.rows), ctypes.c_uint32(self.hidden), ctypes.c_float(self.eps)
        arguments += [*sizes, address(self.scale), address(scales)]
        if kernel.startswith("push"):
            arguments.insert(0, group.params[rank])
        group.kernels.launch(kernel, 2 * cluster, 2, arguments, cluster)
        assert torch.equal(raw(total), canonical(self.total)), kernel
        # A scale that is given is not written.
        expected = self.scales if self.scale is None else torch.full_like(scales, -1.0)
        assert torch.equal(canonical(scales), canonical(expected)), (kernel, scales, expected)
        assert torch.equal(out, self.quantised.view(torch.uint8)), kernel


@pytest.mark.guarantee("D17")
@pytest.mark.parametrize("is_static", [True, False], ids=["static", "dynamic"])
@pytest.mark.parametrize("cluster", [1, 2, 4])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (5, 128), (2, 2560), (1, 8192)])
def test_the_norm_in_8_bits_has_the_bits_of_its_parts(
    group: Group, rows: int, hidden: int, cluster: int, is_static: bool
) -> None:
    """Both fused kernels, and the norm alone after an all-reduce, equal the norm and a quantisation after it."""
    room = group.layout.arena_bytes // (hidden * group.dtype.itemsize * group.world_size)
    if room < rows:
        rows, hidden = 1, hidden // 2
    assert kernel_layout.norm_arena(rows, hidden * group.dtype.itemsize // 16, group.world_size) <= (
        group.layout.arena_bytes
    )
    made = torch.Generator().manual_seed(hidden + rows)
    inputs = [torch.randn(rows, hidden, generator=made).to(group.dtype) for _ in range(group.world_size)]
    residual = torch.randn(rows, hidden, generator=made).to(group.dtype)
    weight = torch.randn(hidden, generator=made).to(group.dtype)
    scale = torch.tensor([0.0123]) if is_static else None
    reduced = sum_in_rank_order(inputs)
    norm = Norm(group, reduced, residual, weight, scale)
    # Few of the results are clamped with the static scale, and one of each row is the largest with a dynamic one.
    assert int((norm.quantised.float().abs() == 448).sum()) >= (1 if not is_static else 0)
    for kernel in ("push_add_rms_norm_fp8", "push_two_shot_add_rms_norm_fp8"):
        group.on_all(lambda rank, kernel=kernel: norm.check(kernel, inputs[rank], rank, cluster))  # type: ignore[misc]
    norm.check("add_rms_norm_fp8", reduced, cluster=cluster)


@pytest.mark.parametrize("cluster", [1, 4])
def test_special_rows_quantise_as_in_torch(alone: Group, cluster: int) -> None:
    """Rows with NaN, infinities, zeros alone, the smallest numbers and any bits match, under both kinds of scales."""
    hidden, dtype = 2056, alone.dtype
    rows = random_words((9, hidden), dtype, 3)
    ordinary = torch.randn(9, hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows[1:7] = ordinary[1:7]
    rows[1] = 0.0
    rows[2] = -0.0
    rows[3, 7] = torch.nan
    rows[4, hidden - 1] = -torch.inf
    rows[5] = torch.finfo(dtype).tiny
    rows[6, ::2] = -0.0
    weight = torch.randn(hidden, generator=torch.Generator().manual_seed(2)).to(dtype)
    nothing = torch.zeros_like(rows)
    tensors = [None, *(torch.tensor(each) for each in (0.01, 1e-30, 0.0, torch.inf, torch.nan, -0.02))]
    for scale in tensors:
        Norm(alone, rows, nothing, weight, scale).check("add_rms_norm_fp8", rows, cluster=cluster)
    dynamic = Norm(alone, rows, nothing, weight, None)
    assert dynamic.scales[1:3].tolist() == [[torch.tensor(SMALLEST_SCALE).item()]] * 2
    assert dynamic.scales[3].isnan().all()
    assert dynamic.quantised[3].view(torch.uint8).eq(0x7F).all()


class BlockNorm(Norm):
    """The same with 4-bit output in blocks."""

    def __init__(
        self,
        group: Group,
        reduced: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        eps: float = EPS,
    ) -> None:
        super().__init__(group, reduced, residual, weight, scale, eps)
        normed, _ = add_rms_norm(reduced, residual, weight, eps)
        self.quantised, self.scales = blocks_quantised(normed, scale)

    def check(self, kernel: str, x: torch.Tensor, rank: int = 0, cluster: int = 1) -> None:
        """Run a kernel as one rank and compare every bit; bytes behind the results must not change."""
        group = self.group
        out, scales = (
            torch.full((each.numel() + 8,), 0xAB, dtype=torch.uint8) for each in (self.quantised, self.scales)
        )
        total = empty(tuple(x.shape), group.dtype)
        arguments: list[object] = [address(each) for each in (x, self.residual, self.weight, out, total)]
        sizes = ctypes.c_uint32(self.rows), ctypes.c_uint32(self.hidden), ctypes.c_float(self.eps)
        arguments += [*sizes, address(self.scale), address(scales)]
        if kernel.startswith("push"):
            arguments.insert(0, group.params[rank])
        group.kernels.launch(kernel, 2 * cluster, 2, arguments, cluster)
        assert torch.equal(raw(total), canonical(self.total)), kernel
        assert torch.equal(scales[:-8], self.scales.view(torch.uint8).flatten()), kernel
        assert torch.equal(out[:-8], self.quantised.flatten()), kernel
        assert set(scales[-8:].tolist() + out[-8:].tolist()) == {0xAB}


@pytest.mark.guarantee("D17")
@pytest.mark.parametrize("cluster", [1, 2, 4])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (5, 144), (2, 2560), (1, 8192)])
def test_the_norm_in_4_bits_has_the_bits_of_its_parts(
    group: Group, rows: int, hidden: int, cluster: int
) -> None:
    """Both fused kernels, and the norm alone after an all-reduce, equal the norm and a quantisation after it."""
    if group.layout.arena_bytes < rows * hidden * group.dtype.itemsize * group.world_size:
        rows, hidden = 1, hidden // 2
    assert kernel_layout.norm_arena(rows, hidden * group.dtype.itemsize // 16, group.world_size) <= (
        group.layout.arena_bytes
    )
    made = torch.Generator().manual_seed(hidden + rows)
    inputs = [torch.randn(rows, hidden, generator=made).to(group.dtype) for _ in range(group.world_size)]
    residual = torch.randn(rows, hidden, generator=made).to(group.dtype)
    weight = torch.randn(hidden, generator=made).to(group.dtype)
    reduced = sum_in_rank_order(inputs)
    norm = BlockNorm(group, reduced, residual, weight, torch.tensor([300.0]))
    for kernel in ("push_add_rms_norm_nvfp4", "push_two_shot_add_rms_norm_nvfp4"):
        group.on_all(lambda rank, kernel=kernel: norm.check(kernel, inputs[rank], rank, cluster))  # type: ignore[misc]
    norm.check("add_rms_norm_nvfp4", reduced, cluster=cluster)


def test_special_blocks_quantise_as_in_torch(alone: Group) -> None:
    """Blocks with NaN, infinities, zeros alone, the smallest numbers and any bits match, under scales of any value."""
    hidden, dtype = 2064, alone.dtype
    rows = random_words((6, hidden), dtype, 4)
    ordinary = torch.randn(6, hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows[1:] = ordinary[1:]
    rows[1, :64] = 0.0
    rows[2, 64:96] = -0.0
    rows[3, 7] = torch.nan
    rows[4, hidden - 1] = -torch.inf
    rows[5] = torch.finfo(dtype).tiny
    # Multiples of a quarter meet every middle between two numbers.
    weight = (torch.randint(-26, 27, (hidden,), generator=torch.Generator().manual_seed(2)) / 4).to(dtype)
    nothing = torch.zeros_like(rows)
    for scale in (1.0, 448.0, 1e4, 1e-30, 0.0, torch.inf, torch.nan, -3.0):
        BlockNorm(alone, rows, nothing, weight, torch.tensor(scale)).check(
            "add_rms_norm_nvfp4", rows, cluster=2
        )


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """Return all 2^16 values of a half, or as many floats: those around each 8-bit number and any bits."""
    if dtype is not torch.float32:
        return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    eights = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = eights[eights.isfinite()].sort().values
    middles = (finite[1:] + finite[:-1]) / 2
    bits = torch.cat([finite, middles, torch.tensor([448.0, 464.0, 480.0, 2.0**-10, 2.0**-9])]).view(
        torch.int32
    )
    near = torch.cat([bits - 2, bits - 1, bits, bits + 1, bits + 2])
    anything = torch.randint(-(2**31), 2**31, (40000,), generator=torch.Generator().manual_seed(1))
    # Exponents where the format has numbers.
    close = anything % (24 << 23) + (112 << 23) | (anything & -(2**31))
    found = torch.cat([near.long(), anything, close]).to(torch.int32)
    return torch.nn.functional.pad(found, (0, -len(found) % 64)).view(dtype)


@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_every_number_converts_as_in_torch(alone: Group, scale: float) -> None:
    """The conversion of all halves, and of floats around every boundary, equals torch's, ties and NaN included."""
    values = every_value(alone.dtype).float()
    ratio = values / torch.tensor(scale)
    found = torch.empty(len(values), dtype=torch.uint8)
    alone.kernels.library.convert_e4m3(address(ratio), address(found), ctypes.c_uint64(len(values)))
    wanted, _ = quantised_rows(values.view(1, -1), torch.tensor([scale]))
    assert torch.equal(found, wanted.view(torch.uint8)[0])
    # torch has the same bits without our clamp and for all numbers that are not NaN.
    plain = ratio.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    is_number = ~values.isnan()
    assert torch.equal(found[is_number], plain[is_number])
    assert set(found[~is_number].tolist()) == {0x7F}
    assert len(found.unique()) == 255


# --- experts --------------------------------------------------------------------------------------------------


class Experts:
    """One rank's arguments of a finalize."""

    def __init__(self, group: Group, tokens: int, hidden: int, k: int, seed: int, has_shared: bool) -> None:
        made = torch.Generator().manual_seed(seed)
        self.group, self.tokens, self.hidden, self.k = group, tokens, hidden, k
        self.count = 1 + seed % 7
        self.outputs = random_words((self.count, hidden), group.dtype, seed)
        self.outputs[0] = torch.randn(hidden, generator=made).to(group.dtype)
        self.rows = torch.randint(-1, self.count, (tokens, k), generator=made, dtype=torch.int32)
        self.rows[0] = self.rows[0].clamp(max=0)
        self.weights = torch.rand(tokens, k, generator=made)
        self.shared = torch.randn(tokens, hidden, generator=made).to(group.dtype) if has_shared else None

    def sums(self) -> torch.Tensor:
        return finalized(self.outputs, self.rows, self.weights, self.shared)

    def run(self, kernel: str, rank: int = 0) -> torch.Tensor:
        """Run a kernel as one rank; return its output."""
        out = empty((self.tokens, self.hidden), self.group.dtype)
        tensors = (self.outputs, self.rows, self.weights, self.shared, out)
        sizes = (self.tokens, self.hidden, self.k, self.count)
        arguments: list[object] = [*map(address, tensors), *map(ctypes.c_uint32, sizes)]
        if kernel.startswith("push"):
            arguments.insert(0, self.group.params[rank])
        self.group.kernels.launch(kernel, 2, 2, arguments)
        return out


@pytest.mark.parametrize("has_shared", [True, False], ids=["shared", "alone"])
@pytest.mark.parametrize(
    ("tokens", "hidden", "k"), [(1, 8, 1), (3, 64, 2), (5, 40, 8), (2, 1024, 6), (4, 16, 0)]
)
def test_the_sums_of_experts_have_the_bits_of_their_parts(
    group: Group, tokens: int, hidden: int, k: int, has_shared: bool
) -> None:
    """The fused kernel, and the local one before an all-reduce, equal torch: missing experts and any bits included."""
    ranks = [Experts(group, tokens, hidden, k, 10 * hidden + r, has_shared) for r in range(group.world_size)]
    ranks[-1].rows[-1] = -1
    wanted = canonical(sum_in_rank_order([each.sums() for each in ranks]))
    for rank, each in enumerate(ranks):
        assert torch.equal(raw(each.run("moe_finalize")), canonical(each.sums())), rank

    def work(rank: int) -> None:
        assert torch.equal(raw(ranks[rank].run("push_moe_finalize", rank)), wanted), rank

    group.on_all(work)


def test_a_row_behind_the_last_one_gives_nan_and_reads_nothing(alone: Group) -> None:
    """The token's sum is NaN whatever lies behind `expert_out`; other tokens are right."""
    experts = Experts(alone, 3, 64, 5, 21, False)
    experts.outputs[:] = 1.0
    experts.rows[:] = 0
    experts.rows[1, 4] = experts.count
    experts.rows[2, 0] = 2**31 - 1
    found = experts.run("moe_finalize")
    assert torch.equal(raw(found), canonical(experts.sums()))
    assert found.isnan().all(1).tolist() == [False, True, True]
    experts.count = 0
    experts.outputs = experts.outputs[:0]
    experts.rows[2] = -1
    assert torch.equal(raw(experts.run("moe_finalize")), canonical(experts.sums()))
    assert experts.sums()[2].tolist() == [0.0] * 64
