"""Tensor dicts: splitting, sending, receiving and joining gives the same dict."""

import collections
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coordinator.host.tensor_dict_format import (
    INLINE_BYTES,
    Landing,
    PackedDict,
    Slicing,
    TensorDictMessage,
    TensorSlot,
    join,
    landing_places,
    split,
)
from shm_broadcast import codec
from shm_broadcast.errors import DecodeError, DisagreementError, UsageError
from tests.unit.shm_broadcast.codec_samples import same

CPU = torch.device("cpu")
LARGE = INLINE_BYTES  # elements: more than INLINE_BYTES bytes of any dtype


def large(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)


def land(packed: PackedDict, slicing: Slicing | None = None) -> Landing:
    """Return the landing of a packed dict whose message and parts have arrived."""
    landing = join(codec.decode(codec.encode(packed.metadata).to_bytes()), CPU, slicing or Slicing())
    assert len(landing.parts) == len(packed.tensors)
    for (plane, into), (sent_plane, sent) in zip(landing.parts, packed.tensors, strict=True):
        assert plane == sent_plane
        assert into.is_contiguous()
        assert sent.is_contiguous()
        into.copy_(sent)
    return landing


def carried(
    tensor_dict: Any, world_size: int = 1, overrides: dict[str, bool] | None = None
) -> dict[Any, Any]:
    """Return what arrives if each rank of an all-gather group sends its slices."""
    slicings = [Slicing(world_size, rank, overrides or {}) for rank in range(world_size)]
    landings = [land(split(tensor_dict, slicing), slicing) for slicing in slicings]
    for position, (_, put) in enumerate(landings[0].sliced):
        put(torch.cat([landing.sliced[position][0] for landing in landings]))
    return landings[0].tensor_dict


# --- round trips ----------------------------------------------------------------------------------------------

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]
SHAPES = [(), (0,), (7,), (3, 5), (2, 0, 4), (LARGE,), (2, LARGE // 2 + 1)]

tensors = st.builds(
    lambda shape, dtype: large(*shape, dtype=dtype), st.sampled_from(SHAPES), st.sampled_from(DTYPES)
)
plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text()
    | st.binary()
    | st.lists(st.floats(allow_nan=False))
)
dicts = st.recursive(
    st.dictionaries(st.text(max_size=5) | st.integers(0, 9), tensors | plain, max_size=4),
    lambda inner: st.dictionaries(st.text(max_size=5), tensors | inner, max_size=3),
    max_leaves=6,
)


@given(dicts, st.integers(1, 4))
def test_a_dict_arrives(tensor_dict: dict[Any, Any], world_size: int) -> None:
    """With any number of slices every value keeps its type, shape, dtype and elements."""
    assert same(carried(tensor_dict, world_size), tensor_dict)


@given(dicts)
def test_splitting_leaves_the_dict_alone(tensor_dict: dict[Any, Any]) -> None:
    """Splitting changes neither the dict nor its values."""
    before = list(tensor_dict.items())
    packed = split(tensor_dict, Slicing(2, 1))
    assert all(now is then for now, then in zip(tensor_dict.values(), dict(before).values(), strict=True))
    assert packed.metadata is not tensor_dict


def test_any_mapping_can_be_sent() -> None:
    """Any mapping can be sent and arrives as a dict."""
    mapping: collections.ChainMap[str, Any] = collections.ChainMap({"x": torch.ones(2)}, {"y": 1})
    arrived = carried(mapping)
    assert type(arrived) is dict
    assert arrived["y"] == 1


@pytest.mark.parametrize("value", [None, [], "x", torch.ones(2), [("x", 1)]])
def test_what_is_no_mapping_is_refused(value: object) -> None:
    """The error names the type of a value that is not a mapping."""
    with pytest.raises(UsageError, match=f"not {type(value).__name__}"):
        split(value, Slicing())  # type: ignore[arg-type]


STRIDED = {
    "transposed": lambda t: t.t(),
    "sliced": lambda t: t[1::3, ::2],
    "expanded": lambda t: t[:1].expand(300, -1),
    "conjugated": lambda t: torch.complex(t, t + 1).conj(),
    "negated": lambda t: torch.complex(t, t + 1).conj().imag,
    "with gradient": lambda t: t.clone().requires_grad_() * 2,
    "a parameter": torch.nn.Parameter,
}


@pytest.mark.parametrize("columns", [4, 400], ids=["small", "large"])
@pytest.mark.parametrize("name", STRIDED)
def test_any_layout_arrives(name: str, columns: int) -> None:
    """Values arrive for small and large tensors of any layout; strides, lazy signs and gradients do not."""
    tensor = STRIDED[name](large(200, columns))
    for world_size in (1, 2):
        arrived = carried({"x": tensor}, world_size)["x"]
        assert type(arrived) is torch.Tensor
        assert not arrived.requires_grad
        assert arrived.is_contiguous()
        assert torch.equal(arrived, tensor.detach())


# --- what travels where ---------------------------------------------------------------------------------------


def test_small_tensors_travel_inside() -> None:
    """A tensor below the limit is part of the message; from the limit on it is sent beside it."""
    below = torch.zeros(INLINE_BYTES - 1, dtype=torch.uint8)
    at = torch.zeros(INLINE_BYTES, dtype=torch.uint8)
    packed = split({"below": below, "at": at}, Slicing())
    assert torch.equal(packed.metadata["below"], below)
    assert packed.metadata["at"] == TensorSlot(0, (INLINE_BYTES,), "uint8", "host", 1)
    assert [(plane, tensor.data_ptr()) for plane, tensor in packed.tensors] == [("host", at.data_ptr())]


def test_slots_count_in_order() -> None:
    """Tensors beside the message follow the order of the dict, nested dicts in their place."""
    packed = split({"a": large(LARGE), "b": {"c": large(LARGE, 2), "d": 1}, "e": large(LARGE, 3)}, Slicing())
    assert [tensor.shape for _, tensor in packed.tensors] == [(LARGE,), (LARGE, 2), (LARGE, 3)]
    assert (packed.metadata["a"].index, packed.metadata["b"]["c"].index, packed.metadata["e"].index) == (
        0,
        1,
        2,
    )


def test_tensors_in_lists_stay_in_the_message() -> None:
    """Only dicts are searched for tensors; lists are sent within the message."""
    packed = split({"x": [large(LARGE)], "y": (large(LARGE),)}, Slicing(2, 0))
    assert packed.tensors == []


def test_tensors_that_are_not_dense_are_refused() -> None:
    """A tensor that is not dense has no plain elements and is refused."""
    with pytest.raises(UsageError, match="only dense"):
        split({"x": torch.eye(2).to_sparse()}, Slicing())


def test_a_dict_that_contains_itself_is_refused() -> None:
    """The codec refuses a dict that contains itself or is nested too deeply."""
    endless: dict[str, Any] = {}
    endless["self"] = endless
    with pytest.raises(UsageError, match="contains itself"):
        split(endless, Slicing())
    deep: dict[str, Any] = {}
    for _ in range(codec.MAX_DEPTH + 1):
        deep = {"x": deep}
    with pytest.raises(UsageError):
        codec.encode(split(deep, Slicing()).message())


def test_the_message_tells_what_follows() -> None:
    """Slots are readable without decoding the tree; without extra tensors the message is the dict itself."""
    assert split({"x": torch.ones(2), "n": 1}, Slicing()).message().keys() == {"x", "n"}  # type: ignore[attr-defined]
    packed = split({"x": large(LARGE), "n": 1, "y": large(8, dtype=torch.int64)}, Slicing(2, 0))
    message = packed.message()
    assert isinstance(message, TensorDictMessage)
    places = landing_places(message, CPU)
    assert [(plane, place.shape, place.dtype) for plane, place in places] == [
        (plane, tensor.shape, tensor.dtype) for plane, tensor in packed.tensors
    ]


# --- slices ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [0, 1, 5, 6, 7, 12])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_tensors_are_sliced_whose_size_divides(numel: int, world_size: int) -> None:
    """Tensors whose size does not divide are sent whole, as are all in a group of one."""
    slices = Slicing(world_size, 0).slices("x", numel)
    assert slices == (world_size if numel and numel % world_size == 0 else 1)


def test_slices_are_cut_from_the_flat_tensor() -> None:
    """Rank i sends the i-th part in C order, even if the first dimension does not divide."""
    whole = large(3, 4)
    for rank in range(4):
        packed = split({"x": whole}, Slicing(4, rank))
        assert packed.metadata["x"] == TensorSlot(0, (3, 4), "float32", "host", 4)
        assert packed.tensors[0][1].tolist() == list(range(3 * rank, 3 * rank + 3))


def test_overrides_are_by_key() -> None:
    """A nested key is `outer.inner`; an overridden tensor is sent whole."""
    overrides = {"x": False, "outer.y": False, "3.z": True}
    packed = split(
        {"x": large(8), "outer": {"y": large(8), "x": large(8)}, 3: {"z": large(8)}}, Slicing(2, 0, overrides)
    )
    assert isinstance(packed.metadata["x"], torch.Tensor)
    assert isinstance(packed.metadata["outer"]["y"], torch.Tensor)
    assert packed.metadata["outer"]["x"].slices == 2
    assert packed.metadata[3]["z"].slices == 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_override_that_names_no_tensor_is_refused(world_size: int) -> None:
    """A misspelt key is refused, but slicing may be disabled for a tensor that only some models have."""
    with pytest.raises(UsageError, match=r"names \['hiden', 'n'\], the dict's tensors are \['hidden'\]"):
        split({"hidden": large(8), "n": 1}, Slicing(world_size, 0, {"hiden": True, "n": True}))
    assert "hidden" in split({"hidden": large(8)}, Slicing(world_size, 0, {"residual": False})).metadata


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        (Slicing(2, 0), Slicing()),
        (Slicing(), Slicing(2, 0)),
        (Slicing(2, 0), Slicing(4, 0)),
        (Slicing(2, 0), Slicing(2, 0, {"d.x": False})),
    ],
)
def test_ranks_that_slice_differently_disagree(sender: Slicing, receiver: Slicing) -> None:
    """The receiver raises before it receives a byte into the wrong place, and names the tensor."""
    with pytest.raises(DisagreementError, match="tensor 'd.x' was sent in"):
        join(split({"d": {"x": large(LARGE)}}, sender).metadata, CPU, receiver)


def test_gathered_slices_take_the_tensors_place() -> None:
    """A gathered tensor replaces its slice in the dict."""
    packed = split({"d": {"x": large(4, 6)}}, Slicing(2, 1))
    landing = land(packed, Slicing(2, 1))
    assert landing.tensor_dict["d"]["x"].shape == (12,)
    ((part, put),) = landing.sliced
    put(torch.cat([torch.zeros(12), part]))
    assert landing.tensor_dict["d"]["x"].tolist() == [*([[0.0] * 6] * 2), *large(4, 6)[2:].tolist()]


# --- hostile metadata -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("metadata", [None, [], 5, "x", TensorSlot(0, (1,), "float32", "host", 1)])
def test_metadata_that_is_no_dict_is_refused(metadata: object) -> None:
    """A message that is not the metadata of a tensor dict is refused."""
    with pytest.raises(DecodeError, match=f"received {type(metadata).__name__}"):
        join(metadata, CPU, Slicing())


@pytest.mark.parametrize(
    ("index", "shape", "dtype"),
    [
        (1, (2,), "float32"),
        (-1, (2,), "float32"),
        (0, (-2,), "float32"),
        (0, (2, -1), "float32"),
        (0, (2,), "float31"),
        (0, (2,), "nn"),
        (0, (2,), "ones"),
        (0, (2,), "torch.float32"),
        (0, (2,), "quint8"),
        (0, (2,), "qint32"),
        (0, (1 << 62,), "float32"),
        (0, (1 << 80,), "float32"),
        (0, (1 << 40, 1 << 40), "float32"),
    ],
)
def test_malformed_slots_are_refused(index: int, shape: tuple[int, ...], dtype: str) -> None:
    """Slots that no split could have made raise an error and never crash."""
    with pytest.raises(DecodeError):
        join({"x": TensorSlot(index, shape, dtype, "host", 1)}, CPU, Slicing())


@pytest.mark.parametrize("slices", [0, -1, 3, 1 << 70])
def test_a_slot_with_another_number_of_slices_is_refused(slices: int) -> None:
    """A slot with any other number of slices is refused."""
    with pytest.raises(DisagreementError):
        join({"x": TensorSlot(0, (6,), "float32", "host", slices)}, CPU, Slicing(2, 0))
