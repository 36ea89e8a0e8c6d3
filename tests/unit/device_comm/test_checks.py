"""The collectives' argument checks refuse what is wrong and nothing else."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from device_comm import checks
from shm_broadcast.errors import UsageError

CPU = torch.device("cpu")
NO_INTEGERS = [True, 1.0, "1", None, [1]]


def test_tensors_of_the_device_are_taken() -> None:
    """Tensors of any strides, size and dtype are accepted, parameters included."""
    for tensor in (
        torch.ones(2),
        torch.ones(()),
        torch.empty(0),
        torch.ones(4, 4).t(),
        torch.nn.Parameter(torch.ones(1)),
    ):
        checks.check_tensor(tensor, CPU, "all_reduce")
    # A device without an index matches any index.
    checks.check_tensor(torch.empty(2, device="meta"), torch.device("meta"), "all_reduce")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "all_reduce: expected a tensor, not float"),
        ([torch.ones(1)], "not list"),
        (None, "not NoneType"),
        (torch.empty(2, device="meta"), "the tensor is on meta, this group's device is cpu"),
        (torch.eye(2).to_sparse(), "only dense"),
    ],
)
def test_other_values_are_refused(value: object, text: str) -> None:
    """The text names the value and what was expected."""
    with pytest.raises(UsageError, match=text):
        checks.check_tensor(value, CPU, "all_reduce")


def test_another_device_of_the_same_kind_is_refused() -> None:
    """A tensor on another device of the same type is refused."""

    class OnDevice(torch.Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("cuda", 0)

    tensor = torch.ones(1).as_subclass(OnDevice)
    checks.check_tensor(tensor, torch.device("cuda", 0), "send")
    checks.check_tensor(tensor, torch.device("cuda"), "send")
    with pytest.raises(UsageError, match="on cuda:0, this group's device is cuda:1"):
        checks.check_tensor(tensor, torch.device("cuda", 1), "send")


def test_sequences_of_tensors() -> None:
    """A list or tuple is accepted, and each element is checked."""
    pair = (torch.ones(1), torch.ones(2))
    assert checks.check_tensors(pair, "all_gatherv") == list(pair)
    for value in (None, 5, "x", b"x", {1: 2}, iter(pair)):
        with pytest.raises(UsageError, match="expected a tensor or a sequence of tensors"):
            checks.check_tensors(value, "all_gatherv")


def test_ranks() -> None:
    """A rank is an int from 0 to the world size; bools and floats are refused."""
    assert [checks.check_rank(rank, 3, "dst") for rank in range(3)] == [0, 1, 2]
    for rank in (-1, 3, 1 << 70):
        with pytest.raises(UsageError, match=f"dst is {rank}, but ranks in this group go from 0 to 2"):
            checks.check_rank(rank, 3, "dst")
    for wrong in NO_INTEGERS:
        with pytest.raises(UsageError, match="dst must be a rank in the group"):
            checks.check_rank(wrong, 3, "dst")


def test_peers() -> None:
    """A peer is any rank but this one."""
    assert checks.check_peer(1, 0, 2, "src") == 1
    with pytest.raises(UsageError, match="src is 1, which is this rank itself"):
        checks.check_peer(1, 1, 2, "src")
    with pytest.raises(UsageError, match="src is 2"):
        checks.check_peer(2, 1, 2, "src")


@pytest.mark.parametrize("shape", [(), (3,), (3, 4), (1, 0, 2)])
def test_dimensions_are_counted_from_the_front(shape: tuple[int, ...]) -> None:
    """Dimensions count from either end; a tensor without dimensions counts as one-dimensional."""
    tensor, dims = torch.empty(shape), max(len(shape), 1)
    assert [checks.check_dim(dim, tensor) for dim in range(-dims, dims)] == [*range(dims), *range(dims)]
    for dim in (dims, -dims - 1):
        with pytest.raises(UsageError, match=f"dim {dim} is out of range"):
            checks.check_dim(dim, tensor)
    for wrong in NO_INTEGERS:
        with pytest.raises(UsageError, match="dim must be an integer"):
            checks.check_dim(wrong, tensor)


def test_even_splits() -> None:
    """The size of the dimension must be a multiple of the ranks; zero is one."""
    shape: tuple[int, ...]
    for shape, dim, ranks in (((4, 3), 0, 2), ((4, 3), 1, 3), ((0, 3), 0, 2), ((), 0, 1)):
        checks.check_divisible(torch.empty(shape), dim, ranks)
    for shape, dim, ranks in (((4, 3), 1, 2), ((), 0, 2), ((1,), 0, 2)):
        with pytest.raises(
            UsageError, match=f"dimension {dim} of shape .* cannot be split evenly over {ranks}"
        ):
            checks.check_divisible(torch.empty(shape), dim, ranks)


def test_sizes() -> None:
    """`sizes` holds one count for each rank."""
    assert checks.check_sizes([0, 2, 1], 3) == (0, 2, 1)
    assert checks.check_sizes(torch.Size([4]), 1) == (4,)
    for sizes in ([1], [1, 2, 3], []):
        with pytest.raises(UsageError, match=f"sizes has {len(sizes)} entries, the group has 2 ranks"):
            checks.check_sizes(sizes, 2)
    for wrong in ([1, -1], [1, True], [1, 2.0], [1, None], ["1", 1], [torch.tensor(1), 1]):
        with pytest.raises(UsageError, match="sizes must be counts"):
            checks.check_sizes(wrong, 2)
    for nothing in (5, "12", b"12", {1, 2}, iter([1, 2]), torch.ones(2)):
        with pytest.raises(UsageError, match="one count for each rank"):
            checks.check_sizes(nothing, 2)


def test_own_and_total_sizes() -> None:
    """The tensor has the size that `sizes` gives for this rank, or for all ranks together."""
    tensor = torch.empty(3, 5)
    checks.check_own_size(tensor, 1, (2, 5), 1)
    checks.check_total_size(tensor, 1, (2, 3, 0))
    checks.check_own_size(torch.tensor(1.0), 0, (1, 9), 0)
    checks.check_total_size(torch.tensor(1.0), 0, (1, 0))
    with pytest.raises(UsageError, match=r"has size 5, but sizes\[0\] is 2"):
        checks.check_own_size(tensor, 1, (2, 5), 0)
    with pytest.raises(UsageError, match="add up to 4, dimension 0 .* has 3"):
        checks.check_total_size(tensor, 0, (2, 2))


def test_outputs() -> None:
    """An output must have the result's shape and dtype."""
    checks.check_output(torch.empty(2, 3), [2, 3], torch.float32)
    for output in (torch.empty(3, 2), torch.empty(6), torch.empty(2, 3, dtype=torch.float64)):
        with pytest.raises(UsageError, match=r"the result has shape \(2, 3\) and dtype torch.float32"):
            checks.check_output(output, [2, 3], torch.float32)


def test_shapes_and_dtypes() -> None:
    """Shape and dtype are checked before `recv` allocates."""
    assert checks.check_shape([2, 0]) == (2, 0)
    assert checks.check_shape(torch.Size(())) == ()
    for wrong in (3, "23", None, [2, -1], [2, True], [2.0], [None]):
        with pytest.raises(UsageError, match="size must be the shape of a tensor"):
            checks.check_shape(wrong)
    assert checks.check_dtype(torch.int8) is torch.int8
    for nothing in ("int8", None, int):
        with pytest.raises(UsageError, match="dtype must be a torch.dtype"):
            checks.check_dtype(nothing)


def test_timeouts() -> None:
    """A deadline is a positive number of seconds, infinity included, or None for the group's own."""
    for timeout_s in (None, 1, 0.001, 1e9, math.inf):
        checks.check_timeout(timeout_s)
    for wrong in (0, -1, -0.0, math.nan, True, "1", [1]):
        with pytest.raises(UsageError, match="timeout_s must be a positive number of seconds"):
            checks.check_timeout(wrong)


# --- memory ---------------------------------------------------------------------------------------------------


def places(tensor: torch.Tensor) -> list[int]:
    """Return the address of every byte of every element, in any order."""
    found = [tensor.data_ptr()] if tensor.numel() else []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        found = [place + index * stride * tensor.itemsize for place in found for index in range(size)]
    return [place + byte for place in found for byte in range(tensor.itemsize)]


def overlaps_itself(tensor: torch.Tensor) -> bool:
    return any(count > 1 for count in Counter(places(tensor)).values())


def refuses(check: Any, *arguments: Any) -> bool:
    try:
        check(*arguments)
    except UsageError:
        return True
    return False


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("expanded", torch.ones(1, 3).expand(4, 3)),
        ("expanded scalar", torch.ones(()).expand(2)),
        ("windows", torch.ones(8).unfold(0, 3, 1)),
        ("strides that meet", torch.ones(20).as_strided((3, 3), (2, 4))),
    ],
)
def test_tensors_that_overlap_themselves_are_refused(name: str, tensor: torch.Tensor) -> None:
    """A write into such a tensor would depend on the order of the elements."""
    with pytest.raises(UsageError, match="broadcast: the tensor of shape .* overlaps itself"):
        checks.check_writable(tensor, "broadcast")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(()),
        torch.empty(0, 3),
        torch.empty(0).expand(3, 0),
        torch.ones(1).expand(1, 1),
        torch.ones(4, 4).t(),
        torch.ones(4, 4)[::2, 1:3],
        torch.ones(8).unfold(0, 3, 3),
        torch.ones(20).as_strided((2, 3), (3, 2)),
        torch.complex(torch.ones(3), torch.ones(3)).real,
    ],
)
def test_tensors_with_memory_of_their_own_are_taken(tensor: torch.Tensor) -> None:
    """A tensor whose elements do not overlap is accepted, whatever its strides."""
    checks.check_writable(tensor, "broadcast")


strided = st.builds(
    lambda dims, offset, dtype: torch.zeros(80, dtype=dtype).as_strided(
        [size for size, _ in dims], [stride for _, stride in dims], offset
    ),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), max_size=4),
    st.integers(0, 7),
    st.sampled_from([torch.uint8, torch.float32]),
)


@given(strided)
def test_overlap_with_itself_is_decided_exactly(tensor: torch.Tensor) -> None:
    """For any sizes and strides the check agrees with counting the bytes."""
    assert refuses(checks.check_writable, tensor, "recv") == overlaps_itself(tensor)


@given(st.data())
def test_overlap_of_two_tensors_is_decided_exactly(data: st.DataObject) -> None:
    """Interleaved views of one buffer, such as two columns, are accepted; shared elements are refused."""
    buffer = torch.zeros(60, dtype=torch.float32)

    def view() -> torch.Tensor:
        dims = data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=3))
        offset = data.draw(st.integers(0, 15))
        return buffer.as_strided([size for size, _ in dims], [stride for _, stride in dims], offset)

    one, other = view(), view()
    shared = bool(set(places(one)) & set(places(other)))
    assert refuses(checks.check_no_overlap, one, other, "reduce_scatterv_into_output") == shared


def test_different_buffers_do_not_overlap() -> None:
    """Different buffers do not overlap, and empty tensors overlap nothing."""
    buffer = torch.ones(4)
    checks.check_no_overlap(buffer, torch.ones(4), "x")
    checks.check_no_overlap(buffer, buffer[:0], "x")
    checks.check_no_overlap(buffer[:2], buffer[2:], "x")
    with pytest.raises(UsageError, match="x: the output shares memory with the input"):
        checks.check_no_overlap(buffer[:3], buffer[2:], "x")


def test_views_whose_elements_stand_askew_overlap() -> None:
    """Two views overlap if their elements share bytes, even at different offsets."""
    memory = bytearray(40)
    one = torch.frombuffer(memory, dtype=torch.int16, count=12)[::2]
    other = torch.frombuffer(memory, dtype=torch.int16, count=12, offset=1)[::3]
    assert set(places(one)) & set(places(other))
    with pytest.raises(UsageError):
        checks.check_no_overlap(one, other, "x")
