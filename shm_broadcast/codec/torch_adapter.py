"""Encode and decode torch's types. Imported only when an object or a message holds one.

A tensor is sent as its dtype, shape and elements in C order. Strides, `requires_grad`, names and storage shared
between tensors are lost, so a tensor that requires grad arrives detached, and a Parameter as the tensor that it holds.

Once this module is loaded, the native core handles contiguous tensors of common dtypes and produces the same bytes.
This module handles the rest, and gives the reason when a tensor cannot be sent.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from shm_broadcast import _core
from shm_broadcast.codec.adapters import checked_shape, expect, integers
from shm_broadcast.codec.wire_format import Builder, Code, DataBuilder, Describer, Description, Refusal
from shm_broadcast.errors import DecodeError
from shm_broadcast.interruption import raised_by_handler

__all__ = ["BUILDERS", "DATA_BUILDERS", "DESCRIBERS", "is_device_tensor"]

_CARRIED: Final = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float4_e2m1fn_x2", "uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7"),
    *("int1", "int2", "int3", "int4", "int5", "int6", "int7"),
    *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
)
_DTYPES: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, name) for name in _CARRIED if hasattr(torch, name)
}
_NAMES: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in _DTYPES.items()}
_QUANTISED: Final = ("qint8", "qint32", "quint8", "quint4x2", "quint2x4")
_ALL_DTYPES: Final[dict[str, torch.dtype]] = _DTYPES | {
    name: getattr(torch, name) for name in _QUANTISED if hasattr(torch, name)
}
_ALL_NAMES: Final = {dtype: name for name, dtype in _ALL_DTYPES.items()}

# Named in each call, because the default device may be another one. torch would parse a string each time.
_CPU: Final = torch.device("cpu")


def _teach_core() -> None:
    """Tell the native core which dtypes it can send through DLPack; complex ones are out, as it loses conjugation."""
    # `torch._C._from_dlpack` is what the public function ends in, without its Python frames.
    imports: Callable[[object], torch.Tensor] = getattr(torch._C, "_from_dlpack", from_dlpack)  # noqa: SLF001
    rows = []
    for name, dtype in _DTYPES.items():
        if dtype.is_complex:
            continue
        sample = torch.empty(1, dtype=dtype, device=_CPU)
        try:
            is_carried = imports(to_dlpack(sample)).dtype is dtype
        except (BufferError, RuntimeError) as error:  # a dtype that DLPack, or this torch's DLPack, lacks
            if raised_by_handler(error):
                raise
            continue
        if is_carried:
            rows.append((name, dtype, to_dlpack(sample)))
    _core.torch_dtypes(torch.Tensor, to_dlpack, imports, tuple(rows))


def is_device_tensor(obj: object) -> bool:
    """Return whether `obj` is a plain tensor outside of host memory."""
    return type(obj) is torch.Tensor and obj.device.type != "cpu"


_teach_core()


def _describe_tensor(obj: torch.Tensor) -> Description:
    # `is_cpu` takes 50 ns, `device.type` 300; a decode step sends a dozen small tensors.
    if not obj.is_cpu:
        raise Refusal(f"it is on {obj.device}; send a tensor dict, or its .cpu()")
    name = _NAMES.get(obj.dtype)
    if name is None:
        raise Refusal(f"its dtype {obj.dtype} is not supported; send the tensors it is made of")
    if obj.layout is not torch.strided:
        raise Refusal(f"its layout {obj.layout} is not supported; send its .to_dense() or its parts")
    plain = obj.detach() if obj.requires_grad else obj
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    plain = plain.contiguous()
    return Code.TORCH_TENSOR, [name, *plain.shape], _core.window(plain, plain.data_ptr(), plain.nbytes)


def _build_tensor(meta: object, body: Any, copy: bool) -> torch.Tensor:
    nbytes = len(body)
    if type(meta) is list and len(meta) == 2 and type(meta[0]) is str and type(meta[1]) is int:
        # Fast path for one dimension, the usual case among small tensors: the same checks in fewer steps.
        dtype = _DTYPES.get(meta[0])
        if dtype is not None and 0 < meta[1] <= nbytes and meta[1] * dtype.itemsize == nbytes:
            if type(body) is not _core.Window or (copy and not body.exclusive):
                tensor = torch.empty(meta[1], dtype=dtype, device=_CPU)
                _core.copy_into(tensor.data_ptr(), nbytes, body)
                return tensor
            return torch.frombuffer(body, dtype=dtype)
    parts = expect(list, meta, "a tensor")
    dtype = _DTYPES.get(parts[0]) if parts and type(parts[0]) is str else None
    if dtype is None:
        raise DecodeError(f"a tensor has an unknown dtype {parts[:1]!r:.200}")
    shape = checked_shape(parts[1:], dtype.itemsize, nbytes)
    if not isinstance(body, _core.Window) or (copy and not body.exclusive) or nbytes == 0:
        tensor = torch.empty(shape, dtype=dtype, device=_CPU)
        _core.copy_into(tensor.data_ptr(), nbytes, body)
        return tensor
    return torch.frombuffer(body, dtype=dtype).view(shape)


def _describe_dtype(obj: torch.dtype) -> Description:
    return Code.TORCH_DTYPE, None, _ALL_NAMES[obj]


def _build_dtype(_meta: object, body: object) -> torch.dtype:
    dtype: torch.dtype | None = _ALL_DTYPES.get(expect(str, body, "a torch.dtype"))
    if dtype is None:
        raise DecodeError(f"torch.{body} is unknown to this torch")
    return dtype


def _describe_size(obj: torch.Size) -> Description:
    return Code.TORCH_SIZE, None, list(obj)


def _build_size(_meta: object, body: object) -> torch.Size:
    sizes = expect(list, body, "a torch.Size")
    return torch.Size(integers(sizes, len(sizes), "a torch.Size"))


def _describe_device(obj: torch.device) -> Description:
    return Code.TORCH_DEVICE, obj.type, obj.index


def _build_device(meta: object, body: object) -> torch.device:
    kind = expect(str, meta, "a torch.device")
    device = torch.device(kind) if body is None else torch.device(kind, expect(int, body, "a torch.device"))
    if (device.type, device.index) != (meta, body):
        raise DecodeError(f"torch reads the device {kind!r:.100}, {body} as {device}")
    return device


def _describe_parameter(obj: torch.nn.Parameter) -> Description:
    # Loaders copy what arrives into a parameter of their own model; a weight there needs no gradient of ours.
    return Code.SUBSTITUTE, None, obj.detach()


def _describe_generator(_obj: torch.Generator) -> Description:
    raise Refusal("a generator belongs to its process; send its seed, or its .get_state(), which is a tensor")


DESCRIBERS: Final[dict[type, Describer]] = {
    torch.Tensor: _describe_tensor,
    torch.nn.Parameter: _describe_parameter,
    torch.Generator: _describe_generator,
    torch.dtype: _describe_dtype,
    torch.Size: _describe_size,
    torch.device: _describe_device,
}
BUILDERS: Final[dict[int, Builder]] = {
    Code.TORCH_DTYPE: _build_dtype,
    Code.TORCH_SIZE: _build_size,
    Code.TORCH_DEVICE: _build_device,
}
DATA_BUILDERS: Final[dict[int, DataBuilder]] = {Code.TORCH_TENSOR: _build_tensor}
