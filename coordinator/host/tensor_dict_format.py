"""Splitting a tensor dict into one metadata message and the tensors that travel beside it.

Small CPU tensors stay in the message, because sending each one separately would cost a trip through the transport.
A `TensorSlot` takes the place of each tensor that travels beside the message.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, cast

import msgspec
import torch

from shm_broadcast import codec
from shm_broadcast.codec import register_type
from shm_broadcast.errors import DecodeError, DisagreementError, UsageError

# CPU tensors below this size travel inside the metadata message, whose first part holds 64 KiB.
INLINE_BYTES: Final = 16 << 10

# With this limit every CPU tensor travels inside, for transports that copy a large message as fast as a single tensor.
WHOLE: Final = 1 << 62

Plane = Literal["host", "device"]


@register_type(name="coordinator.TensorSlot")
class TensorSlot(msgspec.Struct, frozen=True):
    """Stands for a tensor that travels beside the metadata.

    Attributes:
        index: Position among the tensors of its dict.
        shape: Shape of the whole tensor.
        dtype: Name of the dtype, without `torch.`.
        plane: "host" for CPU tensors, "device" for tensors on the sender's device, which arrive on the receiver's.
        slices: Number of ranks among which the tensor is sliced; 1 if it travels whole.
    """

    index: int
    shape: tuple[int, ...]
    dtype: str
    plane: Plane
    slices: int


@register_type(name="coordinator.TensorDictMessage")
class TensorDictMessage(msgspec.Struct, frozen=True):
    """The metadata of a dict with tensors beside it.

    A receiver that cannot decode `tree` still learns from `slots` which transfers follow, and can receive them.

    Attributes:
        slots: The tensors beside the metadata, in order.
        tree: The frame of the metadata.
        parts: The tensors of the "host" slots, in order, if they travel in this message; otherwise None.
    """

    slots: list[TensorSlot]
    tree: bytes
    parts: list[torch.Tensor] | None = None

    def follows(self, slot: TensorSlot) -> bool:
        """Return whether the tensor of `slot` follows the message in a transfer of its own."""
        return slot.plane == "device" or self.parts is None


@dataclasses.dataclass(frozen=True)
class Slicing:
    """The all-gather optimisation: each rank of a group sends only its slice, and the receivers all-gather.

    Attributes:
        world_size: Ranks of the all-gather group.
        rank_in_group: This process's position in it.
        overrides: By key, whether to slice; a key inside a nested dict is `outer.inner`.
    """

    world_size: int = 1
    rank_in_group: int = 0
    overrides: Mapping[str, bool] = dataclasses.field(default_factory=dict)

    def slices(self, key: str, numel: int) -> int:
        """Return into how many slices a tensor is cut; by default every tensor whose size divides evenly is sliced."""
        wanted = self.overrides.get(key, True)
        if self.world_size == 1 or not wanted or numel == 0 or numel % self.world_size:
            return 1
        return self.world_size


WHOLE_TENSORS: Final = Slicing()


@dataclasses.dataclass(frozen=True)
class PackedDict:
    """A tensor dict ready to travel: one message, and the tensors beside it.

    Attributes:
        metadata: The dict, with slots in place of the tensors that travel beside it.
        slots: The slots, in order.
        tensors: Pairs (plane, contiguous tensor) in slot order.
        is_whole: Whether the tensors of the "host" plane travel in the message too.
    """

    metadata: dict[Any, Any]
    slots: list[TensorSlot]
    tensors: list[tuple[Plane, torch.Tensor]]
    is_whole: bool = False

    def message(self) -> object:
        """Return the object that travels ahead of the tensors. Each call encodes the metadata again."""
        if not self.slots:
            return self.metadata
        parts = [tensor for plane, tensor in self.tensors if plane == "host"] if self.is_whole else None
        return TensorDictMessage(self.slots, codec.encode(self.metadata).to_bytes(), parts)

    @property
    def is_single(self) -> bool:
        """Return whether nothing travels beside the message."""
        return not self.tensors or (self.is_whole and all(plane == "host" for plane, _ in self.tensors))

    def beside(self, plane: Plane) -> list[torch.Tensor]:
        """Return the tensors of `plane` that travel beside the message, in order."""
        if plane == "host" and self.is_whole:
            return []
        return [tensor for each, tensor in self.tensors if each == plane]


# Types of values that stay in the metadata as they are.
_LEAVES: Final = frozenset({bool, bytes, float, int, str, type(None)})


def is_flat(tensor_dict: Mapping[Any, Any]) -> bool:
    """Return whether a dict has only CPU tensors and plain values and so can travel unchanged, as most dicts can."""
    if type(tensor_dict) is not dict:
        return False
    for value in tensor_dict.values():
        if type(value) is torch.Tensor:
            if not value.is_cpu or value.layout is not torch.strided:
                return False
        elif type(value) not in _LEAVES:
            return False
    return True


def pack_whole(tensor_dict: Mapping[Any, Any], slicing: Slicing) -> PackedDict:
    """Pack a dict whose CPU tensors all travel in the message. Raises the errors of `split`."""
    if slicing is WHOLE_TENSORS and is_flat(tensor_dict):
        return PackedDict(cast("dict[Any, Any]", tensor_dict), [], [], is_whole=True)
    packed = split(tensor_dict, slicing, WHOLE)
    if packed.slots:
        # Metadata with slots is encoded on its own, which would copy the large tensors inside it once more.
        packed = split(tensor_dict, slicing)
    return dataclasses.replace(packed, is_whole=True)


def split(tensor_dict: Mapping[Any, Any], slicing: Slicing, inline_bytes: int = INLINE_BYTES) -> PackedDict:
    """Split a tensor dict. Tensors inside of lists and other values stay in the metadata.

    Args:
        tensor_dict: The dict to split.
        slicing: How tensors are sliced.
        inline_bytes: Unsliced CPU tensors smaller than this stay in the metadata; `WHOLE` keeps all of them there.

    Raises:
        UsageError: The argument is not a dict, contains itself, holds a sparse or quantized tensor, or lacks a tensor
            that `all_gather_tensors` names.
    """
    if not isinstance(tensor_dict, Mapping):
        raise UsageError(f"expected a dict of tensors and other values, not {type(tensor_dict).__name__}")
    packed = PackedDict({}, [], [])
    keys: set[str] = set()
    try:
        is_simple = inline_bytes == WHOLE and slicing.world_size == 1 and not slicing.overrides
        splitting = _Splitting(is_simple, packed, slicing, inline_bytes, keys)
        packed.metadata.update(_split_value(dict(tensor_dict), "", splitting))
    except RecursionError as error:
        raise UsageError("the dict contains itself, or is nested too deeply") from error
    # Only True overrides must name a tensor: engines disable slicing for tensors that only some models have.
    unknown = {key for key, wanted in slicing.overrides.items() if wanted} - keys
    if unknown:
        raise UsageError(f"all_gather_tensors names {sorted(unknown)}, the dict's tensors are {sorted(keys)}")
    return packed


class _Splitting(NamedTuple):
    """The result and the options of a split. `is_simple`: CPU tensors stay in the metadata, and no key is looked up."""

    is_simple: bool
    packed: PackedDict
    slicing: Slicing
    inline_bytes: int
    keys: set[str]


def _split_value(value: Any, key: str, to: _Splitting) -> Any:
    """Return what the metadata holds for `value`.

    This is not a closure: one that calls itself is a reference cycle, and would keep the tensors until the garbage
    collector runs.
    """
    # Dicts of other types are left to the codec: rebuilt here they would lose their type.
    if type(value) in (dict, OrderedDict):
        return type(value)(
            (name, _split_value(each, f"{key}.{name}" if key else str(name), to))
            for name, each in value.items()
        )
    if not isinstance(value, torch.Tensor):
        return value
    if to.is_simple and type(value) is torch.Tensor and value.is_cpu and value.layout is torch.strided:
        # The codec encodes it, or refuses it.
        return value
    return _place(value, key, to)


def _place(value: torch.Tensor, key: str, to: _Splitting) -> torch.Tensor | TensorSlot:
    """Return what the metadata holds for a tensor: the tensor, or a slot for one that is added to `to.packed`."""
    to.keys.add(key)
    if value.layout is not torch.strided or value.is_quantized:
        raise UsageError(f"only dense, unquantized tensors can be sent, not {value.layout}")
    plane: Plane = "host" if value.device.type == "cpu" else "device"
    slices = to.slicing.slices(key, value.numel())
    if plane == "host" and slices == 1 and value.nbytes < to.inline_bytes:
        # A Parameter travels as a plain tensor.
        return value.detach().as_subclass(torch.Tensor)
    whole = value.detach().resolve_conj().resolve_neg().contiguous()
    part = whole.view(slices, -1)[to.slicing.rank_in_group] if slices > 1 else whole
    dtype = str(value.dtype).removeprefix("torch.")
    slot = TensorSlot(len(to.packed.slots), tuple(value.shape), dtype, plane, slices)
    to.packed.slots.append(slot)
    to.packed.tensors.append((plane, part))
    return slot


@dataclasses.dataclass(frozen=True)
class Landing:
    """Memory for the tensors of a received dict.

    Attributes:
        tensor_dict: The dict, whose tensors are filled once the transfers are complete.
        given: The tensors that came with the metadata; None if every slot's tensor has to be received.
        slots: Counts the slots.
        parts: Pairs (plane, contiguous tensor to receive into), in slot order.
        sliced: For each sliced tensor, its slice and a function that puts the gathered whole in its place.
    """

    tensor_dict: dict[Any, Any]
    given: Iterator[Any] | None = None
    slots: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    parts: list[tuple[Plane, torch.Tensor]] = dataclasses.field(default_factory=list)
    sliced: list[tuple[torch.Tensor, Callable[[torch.Tensor], None]]] = dataclasses.field(
        default_factory=list
    )


def landing_places(message: TensorDictMessage, device: torch.device) -> list[tuple[Plane, torch.Tensor]]:
    """Allocate memory for the tensors that follow `message`."""
    return [
        (slot.plane, _allocate(slot, index, device))
        for index, slot in enumerate(message.slots)
        if message.follows(slot)
    ]


def join(
    metadata: object, device: torch.device, slicing: Slicing, given: Sequence[Any] | None = None
) -> Landing:
    """Replace each slot of `metadata` by a tensor.

    Args:
        metadata: The received metadata; changed in place.
        device: Device on which device tensors arrive.
        slicing: The receiver's all-gather optimisation.
        given: The tensors of the "host" slots, if they came with the metadata.

    Raises:
        DecodeError: The message is not a tensor dict, or a tensor does not match its slot.
        DisagreementError: Sender and receiver were given different all-gather groups or overrides.
    """
    if not isinstance(metadata, dict):
        raise DecodeError(f"expected the metadata of a tensor dict, received {type(metadata).__name__}")
    landing = Landing(metadata, None if given is None else iter(given))
    _fill(metadata, "", device, slicing, landing)
    return landing


def _fill(
    tree: dict[Any, Any], prefix: str, device: torch.device, slicing: Slicing, landing: Landing
) -> None:
    for name, value in tree.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, dict):
            _fill(value, key, device, slicing, landing)
        elif isinstance(value, TensorSlot):
            expected = slicing.slices(key, math.prod(value.shape))
            if value.slices != expected:
                raise DisagreementError(
                    f"tensor {key!r} was sent in {value.slices} slice(s), this rank expects {expected}: sender and "
                    "receiver must be given all-gather groups of one size and the same all_gather_tensors"
                )
            index = next(landing.slots)
            if value.plane == "host" and landing.given is not None:
                part = _check_given(value, index, next(landing.given, None))
            else:
                part = _allocate(value, index, device)
                landing.parts.append((value.plane, part))
            tree[name] = part
            if value.slices > 1:
                landing.sliced.append((part, _setter(tree, name, value.shape)))


def _setter(tree: dict[Any, Any], name: Any, shape: tuple[int, ...]) -> Callable[[torch.Tensor], None]:
    def put(gathered: torch.Tensor) -> None:
        tree[name] = gathered.view(shape)

    return put


def _check_given(slot: TensorSlot, index: int, tensor: object) -> torch.Tensor:
    dtype, shape = _layout_of(slot, index)
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise DecodeError(f"received a tensor that does not match its slot: {slot}")
    return tensor


def _layout_of(slot: TensorSlot, index: int) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and the shape of the tensor that travels for a slot."""
    dtype = getattr(torch, slot.dtype, None)
    # Names that begin with "q" are quantized dtypes, which `split` refuses.
    if (
        not isinstance(dtype, torch.dtype)
        or slot.dtype.startswith("q")
        or slot.index != index
        or any(size < 0 for size in slot.shape)
    ):
        raise DecodeError(f"received a malformed tensor slot: {slot}")
    return dtype, slot.shape if slot.slices == 1 else (math.prod(slot.shape) // slot.slices,)


def _allocate(slot: TensorSlot, index: int, device: torch.device) -> torch.Tensor:
    dtype, shape = _layout_of(slot, index)
    where = torch.device("cpu") if slot.plane == "host" else device
    try:
        return torch.empty(shape, dtype=dtype, device=where)
    except (RuntimeError, TypeError) as error:
        raise DecodeError(
            f"a tensor of shape {shape} and dtype {slot.dtype} cannot be allocated: {error}"
        ) from error
