"""Arrays and tensors arrive with their dtype, shape and elements."""

import subprocess
import sys
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from shm_broadcast import _core
from shm_broadcast.codec import Message, build_owned, decode, encode, numpy_adapter, torch_adapter
from shm_broadcast.codec.wire_format import Code
from shm_broadcast.errors import DecodeError, UsageError
from tests.unit.shm_broadcast.codec_samples import raw, same

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    - {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4},
    key=str,
)


def carried(obj: object, *, copy: bool = True) -> Any:
    """Encode and decode an object."""
    return decode(encode(obj).to_bytes(), copy=copy)


def aligned_frame(obj: object) -> memoryview:
    """Return the frame of `obj` at an address that is a multiple of 64."""
    message = encode(obj)
    buffer = torch.zeros(message.nbytes + 64, dtype=torch.uint8)
    view = buffer.numpy().data[-buffer.data_ptr() % 64 :][: message.nbytes]
    message.write_into(view)
    return view


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor of any dtype with distinct bytes."""
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    if dtype is torch.bool:
        return (torch.arange(nbytes) % 3 == 0).view(shape)
    return (torch.arange(nbytes) % 251).to(torch.uint8).view(dtype).view(shape)


@pytest.mark.guarantee("C2")
@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (64, 65)], ids=["inline", "out of band"])
def test_every_dtype_arrives(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """A tensor of each dtype arrives unchanged, copied or aliased."""
    tensor = filled(dtype, *shape)
    for copy in (True, False):
        arrived = decode(aligned_frame([tensor]), copy=copy)[0]
        assert type(arrived) is torch.Tensor
        assert (arrived.dtype, arrived.shape) == (dtype, tensor.shape)
        assert raw(arrived) == raw(tensor)
        assert arrived.is_contiguous()


STRIDED = {
    "transposed": lambda t: t.t(),
    "sliced": lambda t: t[3:50:7, 5::3],
    "expanded": lambda t: t[:1].expand(200, -1),
    "0-dim": lambda t: t[1, 2],
    "empty": lambda t: t[:0],
    "empty in the middle": lambda t: torch.empty(3, 0, 5),
    "many dimensions": lambda t: t[:8, :8].reshape([2] * 6 + [1] * 20),
    "conjugated": lambda t: torch.complex(t, t + 1).conj(),
    "negated view": lambda t: torch.complex(t, t + 1).conj().imag,
}


@pytest.mark.guarantee("C2")
@pytest.mark.parametrize("name", STRIDED)
def test_tensors_of_any_strides_arrive(name: str) -> None:
    """A tensor of any strides arrives with its elements in C order."""
    tensor = STRIDED[name](torch.arange(64 * 65, dtype=torch.float32).view(64, 65))
    for copy in (True, False):
        arrived = decode(aligned_frame({"t": tensor}), copy=copy)["t"]
        assert arrived.shape == tensor.shape
        assert arrived.is_contiguous()
        assert torch.equal(arrived, tensor)


def described_in_python(obj: object) -> bytes:
    """Return the frame of an array or tensor described by the Python adapter."""
    adapter = numpy_adapter if isinstance(obj, np.ndarray) else torch_adapter
    describe = adapter.DESCRIBERS[type(obj)]
    header, buffers, nbytes = _core.encode(object(), lambda _: describe(obj))
    return Message(header, buffers, nbytes).to_bytes()


def elements(obj: Any) -> bytes:
    """Return the elements of an array or tensor in C order."""
    return obj.tobytes() if isinstance(obj, np.ndarray) else raw(obj)


NATIVE = [
    *(np.zeros((2, 3), char) for char in "?bBhHiIlLefd"),
    *(np.arange(9000, dtype=char).reshape(3, -1) for char in "bBhHiIlLefd"),
    *(np.zeros(()), np.zeros((0, 4)), np.zeros((1,) * 32), np.asfortranarray(np.ones((1, 7)))),
    *(
        filled(getattr(torch, name), 3, 5)
        for name in ("bool", "int8", "uint8", "int64", "float16", "float32")
    ),
    *(
        filled(getattr(torch, name), 70, 65)
        for name in ("bfloat16", "float64", "float8_e4m3fn", "float8_e5m2")
    ),
    *(torch.tensor(1.5), torch.zeros(0, 4), torch.zeros(4, 1).t(), torch.zeros((1,) * 60), torch.ones(3)[1:]),
    torch.ones(3, requires_grad=True),
]


@pytest.mark.guarantee("C14")
@pytest.mark.parametrize("obj", NATIVE, ids=lambda obj: f"{type(obj).__name__}-{obj.dtype}-{list(obj.shape)}")
def test_the_core_writes_ordinary_arrays_as_python_would(obj: Any) -> None:
    """The native core and the Python adapter encode a common array or tensor to the same bytes."""

    def refuse(_obj: object) -> tuple[int, object, object]:
        raise AssertionError("Python was asked")

    encode([np.zeros(1), torch.zeros(1)])  # loads the adapters
    header, buffers, nbytes = _core.encode(obj, refuse)
    assert Message(header, buffers, nbytes).to_bytes() == described_in_python(obj)


@pytest.mark.guarantee("C14")
@pytest.mark.parametrize("obj", NATIVE, ids=lambda obj: f"{type(obj).__name__}-{obj.dtype}-{list(obj.shape)}")
def test_the_core_builds_ordinary_arrays_as_python_would(obj: Any) -> None:
    """The native core and the Python adapter build equal, writable arrays and tensors."""
    asked = []

    def build(code: int, meta: object, body: object) -> object:
        asked.append(code)
        return build_owned(code, meta, body)

    frame = encode(obj).to_bytes()
    native: Any = _core.decode(frame, build, True)
    assert asked == (
        [] if obj.nbytes else [Code.NUMPY_ARRAY if isinstance(obj, np.ndarray) else Code.TORCH_TENSOR]
    )
    python: Any = _core.decode(frame, build, False)
    assert (type(native), native.dtype, native.shape) == (type(python), python.dtype, python.shape)
    assert elements(native) == elements(python) == elements(obj)
    native[...] = 1
    assert elements(python) == elements(obj)
    assert elements(decode(frame)) == elements(obj)


def answer(description: Any, _obj: object) -> Any:
    """Describe every object as `description`."""
    return description


WRONG_SHAPES = [[3], [1, 3], [4, 2], [-4], [4.0], ["4"], [1 << 62, 4], [1 << 63], [2] * 65, [[4]]]


@pytest.mark.guarantee("C10")
@pytest.mark.parametrize("shape", WRONG_SHAPES, ids=str)
@pytest.mark.parametrize("count", [4, 4096], ids=["inline", "out of band"])
def test_a_shape_that_does_not_fit_is_refused(shape: list[Any], count: int) -> None:
    """A shape that the native core rejects raises a DecodeError with the reason."""
    for code, name, data in (
        (Code.NUMPY_ARRAY, "|u1", np.zeros(count, np.uint8)),
        (Code.TORCH_TENSOR, "uint8", torch.zeros(count, dtype=torch.uint8).numpy()),
    ):
        description = (code, [name, *shape], data)
        frame = Message(*_core.encode(object(), partial(answer, description)))
        with pytest.raises(DecodeError, match="dimension|shape|address space"):
            decode(frame.to_bytes())


def test_a_tensor_without_its_storage_is_refused() -> None:
    """A tensor whose storage was freed is refused, and nothing is read."""
    tensor = torch.ones(4096)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(UsageError):
        encode(tensor)


def test_memory_goes_with_the_last_tensor_in_any_thread() -> None:
    """A thread without the GIL may release a received tensor."""
    frames = [encode([torch.ones(size)]).to_bytes() for size in (4, 4096, 40000)]

    def work() -> None:
        for _ in range(200):
            for frame in frames:
                value = decode(frame)[0].requires_grad_()
                value.sum().backward()
                del value

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_tensor_that_requires_grad_arrives_detached() -> None:
    """A received tensor has no gradient."""
    tensor = torch.ones(3, requires_grad=True)
    assert not carried(tensor).requires_grad
    assert torch.equal(carried(tensor * 2), tensor.detach() * 2)


def test_a_parameter_arrives_as_the_tensor_that_it_holds() -> None:
    """A Parameter arrives as a plain tensor without a gradient, small or large, wherever it is."""
    for size in (3, 4000):
        arrived = carried({"w": torch.nn.Parameter(torch.arange(size, dtype=torch.float32))})["w"]
        assert same(arrived, torch.arange(size, dtype=torch.float32))
        assert not arrived.requires_grad
    there = torch.nn.Parameter(torch.ones(2, device="meta"))
    assert decode(encode(there, device_tensor=lambda t: type(t).__name__).to_bytes()) == "Tensor"
    with pytest.raises(UsageError, match="it is on meta"):
        encode(there)


def test_tensors_stand_anywhere() -> None:
    """Tensors, dtypes, sizes and devices arrive inside any container."""
    obj = {
        "a": (torch.ones(2), [torch.zeros(5000)]),
        "b": {torch.float8_e4m3fn: torch.Size([2, 3]), torch.qint8: torch.Size([])},
        "c": [torch.device("cpu"), torch.device("cuda", 3), torch.device("meta"), torch.int8],
    }
    assert same(carried(obj), obj)


def test_copied_tensors_own_writable_memory() -> None:
    """Writing to a copied tensor or array does not change the frame."""
    frame = bytearray(encode([torch.ones(4096), np.ones(4096), np.ones(2)]).to_bytes())
    before = bytes(frame)
    for value in decode(frame):
        value[:] = 7
        assert value[0] == 7
    assert bytes(frame) == before


@pytest.mark.guarantee("C7")
def test_aliases_keep_the_frame_alive_and_aligned() -> None:
    """An aliased tensor views the frame's memory, aligned, and keeps its owner alive."""
    frame = bytearray(encode([torch.ones(4096), np.ones(4096)]).to_bytes())
    tensor, array = decode(frame, copy=False)
    frame[-8:] = bytes(8)
    assert array[-1] == 0
    assert not array.flags.writeable
    with pytest.raises(BufferError):
        frame.append(0)
    del array
    with pytest.raises(BufferError):
        frame.append(0)
    del tensor
    frame.append(0)
    assert decode(aligned_frame([torch.ones(4096)]), copy=False)[0].data_ptr() % 64 == 0


def test_messages_view_memory_of_the_tensor() -> None:
    """A large contiguous tensor is not copied before the frame is written."""
    tensor = torch.zeros(4096)
    message = encode(tensor)
    tensor[0] = 5
    assert decode(message.to_bytes())[0] == 5


ARRAYS = {
    **{char: np.arange(3000).astype(char) for char in "bBhHiIlLqQefdgFDG"},
    "bool": np.arange(5) > 2,
    "big-endian": np.arange(700, dtype=">i4"),
    "big-endian long long": np.arange(700).astype(np.dtype("q").newbyteorder()),
    "0-dim": np.array(7, dtype=np.int16),
    "empty": np.empty((3, 0, 2), np.float32),
    "wide and empty": np.empty((0,), "U20000"),
    "Fortran": np.asfortranarray(np.arange(6000).reshape(60, 100)),
    "strided": np.arange(6000).reshape(60, 100)[::7, ::-3],
    "read-only": np.broadcast_to(np.arange(4), (1000, 4)),
    "bytes": np.array([b"a", b"", b"xyz"]),
    "text": np.array(["a", "日本"] * 500),
    "void": np.frombuffer(b"abcdef", "V3"),
    "datetime64": np.array(["2024-01-01", "NaT"], "M8[ns]"),
    "timedelta64": np.array([1, 2], "m8[25s]"),
    "datetime64 of no unit": np.array(["NaT"], "M8"),
    "structured": np.array([(1, 2.5, "ab"), (3, 4.5, "c")], [("a", "<i2"), ("b", ">f8"), ("c", "U2")]),
    "nested": np.zeros(3, [("x", [("y", "i4", (2, 3)), ("z", "M8[us]")]), ("w", "?")]),
    "aligned": np.zeros(3, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "titled": np.zeros(3, [(("long title", "a"), "i1"), ("b", "f8")]),
    "overlapping": np.zeros(
        3, {"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 2], "itemsize": 9}
    ),
}


@pytest.mark.guarantee("C2")
@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_arrives(name: str) -> None:
    """Every kind of array, its dtype and its first element arrive, copied or aliased."""
    array = ARRAYS[name]
    for copy in (True, False):
        arrived = carried({"a": array, "d": array.dtype}, copy=copy)
        assert same(arrived["a"], array)
        assert arrived["d"] == array.dtype
        assert arrived["a"].dtype.type is array.dtype.type
        assert arrived["a"].dtype.isalignedstruct == array.dtype.isalignedstruct
    if array.size:
        assert same(carried(array.flat[0]), array.flat[0])


def test_numpy_strings_keep_their_zero_bytes() -> None:
    """A numpy string scalar keeps the trailing zeros that an array would drop."""
    for scalar in (np.str_("a\0"), np.str_(""), np.bytes_(b"a\0"), np.bytes_(b"")):
        assert same(carried([scalar]), [scalar]) or type(carried(scalar)) is type(scalar)
        assert carried(scalar) == scalar


@pytest.mark.parametrize(
    ("obj", "reason"),
    [
        (np.array([object()]), "holds Python objects"),
        (np.zeros(2, [("a", "O")]), "holds Python objects"),
        (np.zeros(2, "V0"), "no size"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (np.rec.array([(1,)], dtype=[("a", "i4")]), "recarray"),
        (np.array(["a"], np.dtypes.StringDType()), "holds Python objects"),
        (torch.ones(2, device="meta"), "it is on meta"),
        (torch.ones(2, 2).to_sparse(), "layout torch.sparse_coo"),
        (torch.nn.UninitializedParameter(), "its .data"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arrays_that_do_not_travel_are_named(obj: object, reason: str) -> None:
    """An unsupported array or tensor raises an error with its path and the reason."""
    with pytest.raises(UsageError, match=r'^obj\["x"\]\[1\]') as caught:
        encode({"x": [0, obj]})
    assert reason in str(caught.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantised_tensors_are_refused() -> None:
    """A quantised tensor raises an error that names its dtype."""
    tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(UsageError, match=r"torch\.qint8"):
        encode(tensor)


def test_a_hook_replaces_device_tensors() -> None:
    """The hook replaces tensors outside of host memory, and no others."""
    message = encode(
        [torch.ones(1), torch.ones(2, device="meta")], device_tensor=lambda t: ("there", list(t.shape))
    )
    arrived = decode(message.to_bytes())
    assert same(arrived, [torch.ones(1), ("there", [2])])


@pytest.mark.guarantee("C9")
def test_neither_torch_nor_numpy_is_imported_without_need() -> None:
    """Other objects are sent without importing torch or numpy."""
    code = (
        "import sys; from shm_broadcast.codec import decode, encode; import datetime, enum\n"
        "decode(encode([{1: 'a'}, datetime.datetime.now(), {1.5}]).to_bytes())\n"
        "assert not {'torch', 'numpy', 'pickle'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.guarantee("C9")
def test_a_tensor_is_refused_where_torch_is_missing() -> None:
    """Without torch, a frame with a tensor raises a DecodeError that says so."""
    frame = encode(torch.ones(2)).to_bytes()
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from shm_broadcast.codec import decode; from shm_broadcast.errors import DecodeError\n"
        f"try: decode({frame!r})\n"
        "except DecodeError as error: assert 'torch, which is not installed' in str(error), error\n"
        "else: raise SystemExit(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
