"""The native reductions give the bits of `device_comm.reduction`, at every level, length and alignment."""

import ctypes
import fcntl
import itertools
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from device_comm.reduction import ReduceOperation, check_reducible, reduce_in_rank_order
from shm_broadcast.errors import UsageError
from tests.probes import requires

pytestmark = [
    requires("compiler"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "device_comm" / "csrc" / "reduce"
OBJECTS = ROOT / "build" / "objects"
DRIVER = Path(__file__).with_name("reduce_driver.cpp")
FLAGS = ("-std=c++20", "-O3", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fvisibility=hidden", "-fPIC")

OPERATIONS = tuple(ReduceOperation)  # in the order of reduce::Op
SUM, MEAN, PRODUCT, MIN, MAX = OPERATIONS
# In the order of reduce::Type.
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.bool,
    torch.complex32,
    torch.complex64,
    torch.complex128,
)
COMPONENT = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LEVELS = ("baseline", "neon", "avx2", "avx512")


def allowed(dtype: torch.dtype, op: ReduceOperation) -> bool:
    try:
        check_reducible(dtype, op)
    except UsageError:
        return False
    return True


PAIRS = [(dtype, op) for dtype in DTYPES for op in OPERATIONS if allowed(dtype, op)]


class Kernels:
    """The kernels of every level that this machine can run."""

    def __init__(self, library: Path) -> None:
        self._native = ctypes.CDLL(str(library))
        self._native.reduce_level.restype = ctypes.c_char_p
        self._native.reduce_element_bytes.restype = ctypes.c_size_t
        self._native.reduce_sweep.restype = ctypes.c_long
        self.chosen: str = self._native.reduce_level().decode()
        one = torch.ones(1)
        self.levels = [name for name in LEVELS if self._run(one, [one], SUM, name, False)]

    def knows(self, dtype: torch.dtype, op: ReduceOperation) -> int:
        return int(self._native.reduce_knows(OPERATIONS.index(op), DTYPES.index(dtype)))

    def element_bytes(self, dtype: torch.dtype) -> int:
        return int(self._native.reduce_element_bytes(DTYPES.index(dtype)))

    @staticmethod
    def _which(dtype: torch.dtype, op: ReduceOperation, level: str, streaming: bool) -> tuple[Any, ...]:
        return (OPERATIONS.index(op), DTYPES.index(dtype), ctypes.c_char_p(level.encode()), int(streaming))

    @staticmethod
    def _addresses(parts: Sequence[torch.Tensor]) -> ctypes.Array:
        return (ctypes.c_void_p * len(parts))(*(part.data_ptr() for part in parts))

    def _run(
        self,
        out: torch.Tensor,
        parts: Sequence[torch.Tensor],
        op: ReduceOperation,
        level: str,
        streaming: bool,
    ) -> int:
        which = self._which(out.dtype, op, level, streaming)
        count = (ctypes.c_size_t(len(parts)), ctypes.c_size_t(out.numel()))
        out_at = ctypes.c_void_p(out.data_ptr())
        return int(self._native.reduce_run(*which, out_at, self._addresses(parts), *count))

    def __call__(
        self, parts: Sequence[torch.Tensor], op: ReduceOperation, level: str, streaming: bool = False
    ) -> torch.Tensor:
        out = torch.empty_like(parts[0])
        assert self._run(out, parts, op, level, streaming) == 1
        return out

    def sweep(
        self,
        parts: Sequence[torch.Tensor],
        op: ReduceOperation,
        level: str,
        streaming: bool,
        expected: torch.Tensor,
    ) -> int:
        which = self._which(expected.dtype, op, level, streaming)
        count = ctypes.c_size_t(len(parts))
        expected_at = ctypes.c_void_p(expected.data_ptr())
        return int(self._native.reduce_sweep(*which, self._addresses(parts), count, expected_at))


def built(source: Path) -> Path | None:
    """Return the object file that was linked into the native core, or None if it is older than the sources."""
    made = (OBJECTS / source.relative_to(ROOT)).with_suffix(".o")
    linked = ROOT / "device_comm" / "_core.abi3.so"
    if not (made.exists() and linked.exists()):
        return None
    changed = max(each.stat().st_mtime for each in SOURCES.iterdir())
    # A build that was interrupted leaves objects that are newer than the core.
    return made if changed < made.stat().st_mtime <= linked.stat().st_mtime else None


def build(folder: Path) -> Path:
    """Link the reductions with the driver into one library; compile what the last build does not have."""
    compiler = shutil.which("g++") or "clang++"
    sources = [*sorted(SOURCES.glob("reduce*.cpp")), DRIVER]
    assert len(sources) == 5
    objects = {source: built(source) for source in sources}
    running = []
    for source, made in objects.items():
        if made is None:
            objects[source] = folder / f"{source.stem}.o"
            words = ["-fno-strict-aliasing", f"-I{SOURCES}", "-c", str(source), "-o", str(objects[source])]
            running.append(subprocess.Popen([compiler, *FLAGS, *words]))
    assert [process.wait(timeout=120) for process in running] == [0] * len(running)
    library = folder / "reduce.so"
    linked = [str(made) for made in objects.values()]
    subprocess.run([compiler, "-shared", *linked, "-o", str(library)], check=True, timeout=60)
    return library


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Kernels:
    """Build once for all the processes that run tests."""
    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "reduce_kernels"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        library = folder / "reduce.so"
        if not library.exists():
            build(folder)
    return Kernels(library)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits; a complex number gives those of each component."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.contiguous().view(BITS[tensor.element_size()])


def nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return (tensor.double() if tensor.is_floating_point() else tensor).isnan()


def differing(got: torch.Tensor, expected: torch.Tensor, op: ReduceOperation) -> torch.Tensor:
    """Return where the bits differ. Any NaN equals any other, unless the operation only copies an input.

    In torch it depends on the processor which of two NaN is the result of a sum and what a NaN of 16 bits becomes. For
    f16 it also depends on the position.
    """
    copies = op in (MIN, MAX) and got.dtype in (torch.float32, torch.float64)
    same = bits(got) == bits(expected)
    if not copies:
        same |= nan(got) & nan(expected)
    return (~same).nonzero()


def pool(dtype: torch.dtype) -> torch.Tensor:
    """Return all values of a narrow dtype, or special and random values of a wide one."""
    if dtype.is_complex:
        component = pool(COMPONENT[dtype])[:4096]
        # The step is coprime to the length, which combines all kinds of components.
        other = component[torch.arange(len(component)) * 7 % len(component)]
        return torch.view_as_complex(torch.stack([component, other], -1).contiguous())
    if dtype is torch.bool:
        return torch.tensor([0, 1, 1, 0, 2, 255, 0] * 10, dtype=torch.uint8).view(dtype)
    size = dtype.itemsize
    if size <= 2:
        every = torch.arange(1 << (8 * size), dtype=torch.int32).to(BITS[size]).view(dtype)
        return every[torch.randperm(len(every), generator=torch.Generator().manual_seed(size))]
    words = BITS[size]
    low, high = torch.iinfo(words).min, torch.iinfo(words).max
    generator = torch.Generator().manual_seed(size)
    drawn = torch.randint(low, high, (2000,), dtype=words, generator=generator).view(dtype)
    if not dtype.is_floating_point:
        edges = torch.tensor([0, 1, -1, 2, high, low, low + 1], dtype=words).view(dtype)
        return torch.cat([edges, drawn])
    f = torch.finfo(dtype)
    infinity = torch.tensor([torch.inf], dtype=dtype).view(words).item()
    quiet = 1 << (22 if size == 4 else 51)
    odd = torch.tensor([infinity + 1, infinity + quiet + 2, low + infinity + 3, low + infinity + quiet + 4])
    numbers = [0.0, 1.0, 3.0, 1 / 3, f.eps, f.max, f.tiny, f.smallest_normal / 4, f.tiny * f.eps, torch.inf]
    signed = [sign * number for number in numbers for sign in (1, -1)]
    near = torch.randn(2000, generator=generator, dtype=dtype)
    return torch.cat([torch.tensor(signed, dtype=dtype), odd.to(words).view(dtype), drawn, near])


def of_ranks(dtype: torch.dtype, ranks: int, length: int | None = None) -> list[torch.Tensor]:
    """Return a tensor for each rank. At equal positions they combine the values of the pool."""
    values = pool(dtype)
    # Every special value is combined with every other one. All values follow, in another order on each rank.
    first = torch.cat([values[:30].repeat_interleave(30), values])
    parts = [first]
    for rank in range(1, ranks):
        again = values[:30].roll(rank - 1).repeat(30)
        parts.append(torch.cat([again, values.roll(rank * 97 + 1)]))
    if dtype.itemsize == 1 and dtype is not torch.bool:  # combine all pairs of values
        parts = [values.repeat_interleave(256), *(values.roll(rank).repeat(256) for rank in range(1, ranks))]
    return [part[:length].clone() for part in parts]


@pytest.mark.guarantee("D2")
@pytest.mark.usefixtures("two_torch_threads")
@pytest.mark.parametrize("op", OPERATIONS)
def test_the_bits_are_those_of_the_reference(kernels: Kernels, op: ReduceOperation) -> None:
    """All levels give the reference's bits for special values, all values of 8 and 16 bits and all pairs of 8 bits."""
    for dtype, ranks in itertools.product(DTYPES, (1, 2, 3, 4, 8)):
        if not allowed(dtype, op):
            continue
        parts = of_ranks(dtype, ranks, length=None if ranks <= 2 else 4000)
        results = [kernels(parts, op, level, streaming=ranks == 2) for level in kernels.levels]
        wrong = differing(results[0], reduce_in_rank_order(parts, op), op)
        assert not len(wrong), (dtype, ranks, wrong[0].tolist(), [bits(part)[wrong[0][0]] for part in parts])
        for level, result in zip(kernels.levels[1:], results[1:], strict=True):
            assert torch.equal(bits(results[0]), bits(result)), (dtype, ranks, level)


@pytest.mark.guarantee("D2")
@pytest.mark.parametrize("streaming", [False, True], ids=["cached", "streaming"])
def test_length_and_alignment_change_nothing(kernels: Kernels, streaming: bool) -> None:
    """The bits are the same for any length and alignment, in place or not, and no byte beside them is written."""
    for (dtype, op), ranks in itertools.product(PAIRS, (1, 2, 3, 4, 8)):
        parts = of_ranks(dtype, ranks, length=900)
        parts = [part[100:170].clone() for part in parts]
        expected = kernels(parts, op, "baseline" if "baseline" in kernels.levels else "neon")
        for level in kernels.levels:
            failed = kernels.sweep(parts, op, level, streaming, expected)
            assert failed == -1, f"{dtype} {op} {level} of {ranks} ranks: length * 100 + target {failed}"


@pytest.mark.guarantee("D2")
@pytest.mark.usefixtures("two_torch_threads")
def test_long_tensors_and_many_ranks(kernels: Kernels) -> None:
    """A thousand ranks give the bits of the reference, and tensors of many blocks do too."""
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        many = [torch.randn(131, generator=generator).mul(9).to(dtype) for _ in range(1024)]
        long = [torch.randn(100_003, generator=generator).mul(9).to(dtype) for _ in range(2)]
        for parts, level, streaming in itertools.product((many, long), kernels.levels, (False, True)):
            got = kernels(parts, SUM, level, streaming)
            assert torch.equal(bits(got), bits(reduce_in_rank_order(parts, SUM))), (dtype, level)


def test_the_sum_of_two_nan_is_that_of_the_later_rank(kernels: Kernels) -> None:
    """The sum or product of two NaN is the later rank's NaN, made quiet, at any position."""
    first = torch.full((67,), 0x7F800001, dtype=torch.int32).view(torch.float32)
    second = torch.full((67,), -0x7FFFFE, dtype=torch.int32).view(torch.float32)
    for level, op in itertools.product(kernels.levels, (SUM, MEAN, PRODUCT)):
        assert (bits(kernels([first, second], op, level)) == -0x3FFFFE).all()
        assert (bits(kernels([second, first], op, level)) == 0x7FC00001).all()


def test_the_bits_of_a_16_bit_nan(kernels: Kernels) -> None:
    """A bf16 NaN becomes 0xffff. An f16 NaN keeps its sign and payload and becomes quiet."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    brain = numbers.view(torch.bfloat16)
    half = numbers.view(torch.float16)
    for level in kernels.levels:
        assert (bits(kernels([brain], SUM, level))[brain.isnan()] == -1).all()
        expected = torch.where(half.isnan(), numbers | 0x200, numbers)
        assert torch.equal(bits(kernels([half], SUM, level)), expected)


@pytest.mark.guarantee("D3")
def test_exactly_the_allowed_reductions_have_a_kernel(kernels: Kernels) -> None:
    """There is a kernel for each pair that the contract allows. Element sizes match; the widest level is chosen."""
    for dtype, op in itertools.product(DTYPES, OPERATIONS):
        assert kernels.knows(dtype, op) == allowed(dtype, op)
        assert kernels.element_bytes(dtype) == dtype.itemsize
    assert kernels.chosen == kernels.levels[-1]


@pytest.mark.guarantee("D2")
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_bits_reduce_like_the_reference(kernels: Kernels, data: st.DataObject) -> None:
    """Tensors of any bits and length on any number of ranks give the reference's bits."""
    dtype, op = data.draw(st.sampled_from(PAIRS))
    ranks = data.draw(st.integers(1, 9))
    size = data.draw(st.integers(1, 40)) * dtype.itemsize
    drawn = [data.draw(st.binary(min_size=size, max_size=size)) for _ in range(ranks)]
    parts = [torch.frombuffer(bytearray(part), dtype=torch.uint8).view(dtype) for part in drawn]
    for level in kernels.levels:
        assert not len(differing(kernels(parts, op, level), reduce_in_rank_order(parts, op), op))
