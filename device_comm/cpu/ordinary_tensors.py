"""Tells the native core which tensors it can read, and make, by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from device_comm import _core


def teach_core(types: Mapping[torch.dtype, int]) -> None:
    """Let `Fabric.all_reduce` take contiguous tensors of those of `types` that DLPack carries. Once per process.

    None of them complex: DLPack does not tell whether a tensor is conjugated.
    """
    # What the public function ends in, without its Python frames; where it is not, the public one does as well.
    imports: Callable[[object], torch.Tensor] = getattr(torch._C, "_from_dlpack", from_dlpack)  # noqa: SLF001
    carried = {}
    for dtype, code in types.items():
        if dtype.is_complex:
            continue
        try:
            returned = imports(to_dlpack(torch.empty(1, dtype=dtype, device="cpu")))
        except (BufferError, RuntimeError):  # a dtype that DLPack, or this torch's part of it, does not have
            continue
        if returned.dtype is dtype:
            carried[dtype] = code
    _core.ordinary_tensors(torch.Tensor, to_dlpack, imports, carried)


__all__ = ["teach_core"]
