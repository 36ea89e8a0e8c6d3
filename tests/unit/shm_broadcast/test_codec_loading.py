"""Signal handlers that raise while the codec loads what it needs for the first array or tensor of a process."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
import torch

from shm_broadcast import codec
from shm_broadcast.codec import decode, encode, numpy_adapter, torch_adapter
from tests.handlers import handling_at, raising_at

PLACES = (
    "shm_broadcast/codec/__init__.py",
    "shm_broadcast/codec/numpy_adapter.py",
    "shm_broadcast/codec/torch_adapter.py",
    "importlib/__init__.py",
)
# More than the places of any of the calls.
STEPS = 3000

# What the native core cannot send or build by itself.
OBJECTS: dict[str, tuple[ModuleType, object]] = {
    "torch": (torch_adapter, [torch.ones(2, dtype=torch.complex64), torch.float32]),
    "numpy": (numpy_adapter, [np.ones(2, dtype=np.complex64), np.dtype("f4")]),
}


@contextmanager
def not_loaded(adapter: ModuleType) -> Iterator[None]:
    """Let the codec have no adapter of that package yet within the block."""
    kept = adapter.__name__.rpartition(".")
    tables = (
        (codec._describers, adapter.DESCRIBERS),
        (codec._builders, adapter.BUILDERS),
        (codec._data_builders, adapter.DATA_BUILDERS),
    )
    patches = [mock.patch.dict(table) for table, _ in tables]
    with (
        patches[0],
        patches[1],
        patches[2],
        mock.patch.dict(sys.modules),
        mock.patch.object(codec, kept[2], adapter),
    ):
        for table, own in tables:
            for key in own:
                table.pop(key, None)
        del sys.modules[adapter.__name__]
        yield


@pytest.mark.parametrize("adapter", OBJECTS)
def test_a_strike_while_the_first_tensor_is_sent_leaves_tensors_sendable(adapter: str) -> None:
    """Wherever a handler raises in the first call, the next one of that process sends the tensor."""
    module, obj = OBJECTS[adapter]
    frame = encode(obj).to_bytes()
    for step in count():
        assert step < STEPS, "the call has more places"
        with not_loaded(module):
            is_struck = raising_at(step, lambda: encode(obj), PLACES)
            assert encode(obj).to_bytes() == frame, step
        if not is_struck:
            break
    assert step > 5


@pytest.mark.parametrize("adapter", OBJECTS)
def test_a_strike_while_the_first_tensor_is_received_leaves_tensors_receivable(adapter: str) -> None:
    """As where it is sent; what has been received can be sent on."""
    module, obj = OBJECTS[adapter]
    frame = encode(obj).to_bytes()
    for step in count():
        assert step < STEPS, "the call has more places"
        with not_loaded(module):
            is_struck = raising_at(step, lambda: decode(frame), PLACES)
            assert encode(decode(frame)).to_bytes() == frame, step
        if not is_struck:
            break
    assert step > 5


@pytest.mark.parametrize("adapter", OBJECTS)
def test_a_handler_that_sends_the_first_tensor_within_another_call_refuses_neither(adapter: str) -> None:
    """What the handler has loaded is there for the call that it has interrupted; so it is for another thread."""
    module, obj = OBJECTS[adapter]
    frame = encode(obj).to_bytes()
    for step in count():
        assert step < STEPS, "the call has more places"
        frames: list[bytes] = []

        def send() -> None:
            frames.append(encode(obj).to_bytes())  # noqa: B023 - called within the same round

        with not_loaded(module):
            has_come = handling_at(step, send, send, PLACES[:1])
        assert frames == [frame] * (1 + has_come), step
        if not has_come:
            break
    assert step > 5
