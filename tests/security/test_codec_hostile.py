"""Hostile bytes raise DecodeError: no code runs, little memory is used, and the next message arrives."""

import dataclasses
import enum
import os
import pickle
import resource
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from shm_broadcast.codec import decode, encode
from tests.hostile_frames import BYTEARRAY, BYTES, DATA, array, ext, frame_of, hook, packed, refused, tried
from tests.unit.shm_broadcast.codec_samples import VALUES, Pair, Point

pytestmark = pytest.mark.usefixtures("the_next_message_arrives")


class Loose(enum.IntFlag):
    """A Flag that keeps unknown bits, which a peer can find without registration."""

    ONE = 1
    TWO = 2
    FOUR = 4


Known = enum.Flag("Known", "A B C D E F G H I J K L")

PER_BYTE = 250
"""Bytes of memory at most for each byte received, beside a fixed 64 KiB."""

FAR_ARRAY = hook(64, ["<i2", 2], b"\xc0")
"""An array whose data is the next buffer."""

TREES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "end inside"),
    "never used tag": (b"\xc1", "tag"),
    "float 32": (b"\xca\0\0\0\0", "tag"),
    "bin 32": (b"\xc6\0\0\0\0", "tag"),
    "fixext": (b"\xd4\1\0", "tag"),
    "timestamp": (b"\xd6\xff\0\0\0\0", "tag"),
    "ext 8": (b"\xc7\1\1\x90", "tag"),
    "two values": (b"\1\1", "after the end"),
    "array beyond the end": (b"\x93\1\1", "claims more"),
    "huge array": (b"\xdd\xff\xff\xff\xff" + b"\1" * 100, "claims more"),
    "huge map": (b"\xdf\xff\xff\xff\xff" + b"\1" * 100, "claims more"),
    "nested claims": (b"".join(b"\xdc" + struct.pack(">H", 60) for _ in range(40)), "claims more"),
    "huge string": (b"\xdb\xff\xff\xff\xffabc", "string ends"),
    "huge bytes": (b"\xc5\xff\xffabc", "bytes end"),
    "huge extension": (b"\xc9\xff\xff\xff\xff\1\x90", "extension ends"),
    "depth": (b"\x91" * 257 + b"\1", "too many levels"),
    "great depth": (b"\x91" * 1_000_000 + b"\1", "too many levels"),
    "depth of maps": (b"\x81\1" * 300 + b"\1", "too many levels"),
    "unhashable key": (b"\x81\x90\1", "unhashable"),
    "unhashable element": (ext(2, b"\x91\x90"), "unhashable"),
    "unhashable inside a tuple": (b"\x81" + ext(1, b"\x91\x80") + b"\1", "unhashable"),
    "key twice": (b"\x82\xa1a\1\xa1a\2", "twice"),
    "equal keys": (b"\x82\1\1\xc3\2", "twice"),
    "element twice": (ext(2, b"\x92\1\1"), "twice"),
    "frozen element twice": (ext(3, b"\x92\1\1"), "twice"),
    "not UTF-8": (b"\xa2\xff\xfe", "utf-8"),
    "key that is not UTF-8": (b"\x81\xa2\xff\xfe\1", "utf-8"),
    "plain surrogate": (b"\xa3\xed\xa0\x80", "utf-8"),
    "bad surrogates": (ext(7, b"\xff"), "utf-8"),
    "tuple of no array": (ext(1, b"\1"), "array was expected"),
    "tuple with more": (ext(1, b"\x91\1\1"), "left over"),
    "empty tuple payload": (ext(1, b""), "end inside"),
    "buffer that is missing": (ext(5, b""), "does not have"),
    "buffer with a payload": (ext(6, b"\1"), "does not have"),
    "code 0": (ext(0, b"\1"), "does not use"),
    "code 8": (ext(8, b"\1"), "does not use"),
    "code 128": (ext(128, b"\1"), "does not use"),
    "code 255": (ext(255, b"\1"), "does not use"),
    "unknown code of Python": (hook(55, None, b"\1"), "unknown to this version"),
    "unknown data code": (hook(99, None, b"\xc5\0\0"), "unknown to this version"),
    "no pair": (ext(19, b"\x91\1"), "pair"),
    "data that is a list": (hook(64, ["<i4", 1], b"\x90"), "data was expected"),
    "unknown class": (hook(19, "os.system", b"\x90"), "os.system, which is not registered"),
    "class name that is no string": (hook(19, ["a"], b"\x90"), "not registered"),
    "record with no fields": (hook(19, f"{Point.__module__}.Point", b"\x80"), "has the fields"),
    "record that is a list": (hook(19, f"{Point.__module__}.Point", b"\x90"), "has the fields"),
    "named tuple with more": (
        hook(19, f"{Pair.__module__}.Pair", packed({"left": 1, "x": 2})),
        "has the fields",
    ),
    "enum that is a function": (hook(18, "os:system", packed("A")), "no loaded module"),
    "enum that is a class": (hook(18, "builtins:int", packed("A")), "no loaded module"),
    "enum base": (hook(18, "enum:Enum", packed("A")), "no loaded module"),
    "enum through a class": (hook(18, "builtins:int.__class__", packed("A")), "no loaded module"),
    "enum member unknown": (hook(18, "uuid:SafeUUID", packed("_missing_")), "not a member"),
    "enum value of no flag": (hook(18, "uuid:SafeUUID", packed(0)), "not a member"),
    "flag bits unknown": (
        hook(18, "tests.unit.shm_broadcast.codec_samples:Access", packed(8)),
        "not a member",
    ),
    "flag negative": (hook(18, "tests.unit.shm_broadcast.codec_samples:Access", packed(-1)), "not a member"),
    "registered name as an enum": (hook(18, f"{Point.__module__}.Point", packed("A")), "no loaded module"),
    "datetime of text": (hook(22, None, packed(["a"] * 8)), "integers"),
    "datetime too short": (hook(22, None, packed([1, 1])), "integers"),
    "datetime out of range": (hook(22, None, packed([2024, 13, 1, 0, 0, 0, 0, 0])), "month"),
    "datetime with a strange zone": (hook(22, 5, packed([2024, 1, 1, 0, 0, 0, 0, 0])), "time zone"),
    "timedelta overflow": (hook(25, None, packed([1 << 62] * 3)), "no valid frame"),
    "timezone too far": (hook(26, None, packed(VALUES["timedeltas"][1])), "offset"),
    "zone outside": (hook(27, None, packed("../../etc/passwd")), "not a valid key"),
    "zone absolute": (hook(27, None, packed("/etc/passwd")), "not a valid key"),
    "zone unknown": (hook(27, None, packed("Nowhere/Land")), "No time zone"),
    "zone directory": (hook(27, None, packed("Europe")), "no valid frame"),
    "uuid too short": (hook(28, None, packed(b"abc")), "16"),
    "decimal of nonsense": (hook(29, None, packed("1.0.0")), "no valid frame"),
    "decimal with spaces": (hook(29, None, packed(" 1 ")), "notation"),
    "singleton unknown": (hook(30, None, packed("None")), "singleton"),
    "factory unknown": (hook(21, "eval", packed({})), "default_factory"),
    "deque too long": (hook(20, 1, packed([1, 2])), "longer"),
    "deque negative": (hook(20, -1, packed([])), "longer"),
    "deque of huge length": (hook(20, 1 << 63, packed([])), "no valid frame"),
    "complex of text": (hook(17, "a", packed(1.0)), "complex"),
    "big int of text": (hook(16, None, packed("a")), "integer"),
    "dtype with objects": (array("|O8", [1], bytes(8)), "not a supported dtype"),
    "dtype of many": (array("i4,i4", [1], bytes(8)), "not a supported dtype"),
    "dtype by attribute": (array("numpy.int8", [1], bytes(1)), "not a supported dtype"),
    "dtype of no size": (array("|S0", [1 << 40], b""), "size"),
    "dtype as a number": (array(5, [1], bytes(8)), "dtype"),
    "array of no dtype": (hook(64, [], b"\xc5\0\0"), "dtype"),
    "array meta of text": (hook(64, "a", b"\xc5\0\0"), "needs a list"),
    "array too short": (array("<i4", [3], bytes(8)), "got 8 bytes"),
    "array too long": (array("<i4", [1], bytes(8)), "got 8 bytes"),
    "array negative": (array("<i4", [-1, -2], bytes(8)), "natural"),
    "array of floats": (array("<i4", [2.0], bytes(8)), "natural"),
    "array of bools": (array("<i4", [True, 2], bytes(8)), "natural"),
    "shape that overflows": (array("<i4", [1 << 62, 4], b""), "address space"),
    "shape that wraps to zero": (array("<i4", [1 << 32, 1 << 32], b""), "address space"),
    "empty shape that overflows": (array("<i4", [0, 1 << 62, 1 << 62], b""), "address space"),
    "array of many dimensions": (array("<i4", [1] * 65, bytes(4)), "dimensions"),
    "field that is no list": (array(["fields", [5], 8, False], [1], bytes(8)), "malformed"),
    "field outside": (array(["fields", [["a", "<i4", 6, None]], 8, False], [1], bytes(8)), "no valid frame"),
    "field far outside": (
        array(["fields", [["a", "<i4", 1 << 40, None]], 8, False], [1], bytes(8)),
        "outside",
    ),
    "field twice": (
        array(["fields", [["a", "<i4", 0, None]] * 2, 8, False], [1], bytes(8)),
        "no valid frame",
    ),
    "item of huge size": (array(["fields", [], 1 << 40, False], [1], bytes(8)), "too large"),
    "subarray of huge size": (array(["array", "<i8", [1 << 20, 1 << 20]], [0], b""), "too large"),
    "array of subarrays": (array(["array", "<i2", [2]], [2], bytes(8)), "size"),
    "scalar of the wrong size": (hook(65, "<i4", b"\xc5\0\1\0"), "scalar"),
    "text out of Unicode": (hook(65, "<U1", b"\xc5\0\4\xff\xff\xff\xff"), "no valid frame"),
    "tensor dtype unknown": (array("qint8", [1], bytes(1), 80), "unknown dtype"),
    "tensor dtype by attribute": (array("load", [1], bytes(1), 80), "unknown dtype"),
    "tensor of no dtype": (hook(80, [], b"\xc5\0\0"), "unknown dtype"),
    "tensor too short": (array("float32", [3], bytes(8), 80), "got 8 bytes"),
    "tensor that overflows": (array("float32", [1 << 33, 1 << 33], b"", 80), "address space"),
    "tensor of many dimensions": (array("int8", [1] * 65, bytes(1), 80), "dimensions"),
    "torch dtype unknown": (hook(48, None, packed("load")), "unknown to this torch"),
    "torch size of text": (hook(49, None, packed(["a"])), "integers"),
    "torch device unknown": (hook(50, "nonsense", packed(None)), "no valid frame"),
    "torch device out of range": (hook(50, "cuda", packed(1 << 40)), "as cuda:0"),
}


@pytest.mark.guarantee("C10")
@pytest.mark.parametrize("name", TREES)
def test_a_malformed_tree_is_refused(name: str) -> None:
    """Each malformed tree raises DecodeError with the reason."""
    tree, reason = TREES[name]
    assert reason.lower() in refused(frame_of(tree)).lower()


def test_frames_of_this_file_are_right() -> None:
    """The helpers build frames that the codec accepts if nothing is wrong with them."""
    assert decode(frame_of(packed([1, "a"]))) == [1, "a"]
    frame = frame_of(b"\x92" + ext(5, b"") + ext(6, b""), b"abc", b"", kinds=(BYTES, BYTEARRAY))
    assert decode(frame) == [b"abc", bytearray()]
    assert decode(frame_of(array("<i2", [2], b"\1\0\2\0"))).tolist() == [1, 2]
    assert decode(frame_of(FAR_ARRAY, b"\1\0\2\0", kinds=(DATA,))).tolist() == [1, 2]


@pytest.mark.guarantee("C10")
@pytest.mark.parametrize("kind", [DATA, BYTES, BYTEARRAY, 3, 128, 255])
def test_a_buffer_of_another_kind_than_the_tree_says_is_refused(kind: int) -> None:
    """A buffer is used as its table entry says, or refused."""
    for right, tree in ((DATA, FAR_ARRAY), (BYTES, ext(5, b"")), (BYTEARRAY, ext(6, b""))):
        if kind != right:
            assert "another kind" in refused(frame_of(tree, b"abcd", kinds=(kind,)))


PREFIXES = {
    "magic": (0, b"GCBD", "magic"),
    "version": (4, b"\2", "version"),
    "flags": (5, b"\1", "flags"),
    "reserved": (6, b"\1", "flags"),
    "total": (8, b"\0\0", "length"),
    "tree longer": (16, struct.pack("<Q", 1 << 62), "tree is longer"),
    "tree of all ones": (16, b"\xff" * 8, "tree is longer"),
    "buffers more": (24, struct.pack("<Q", 1 << 61), "table"),
    "buffers of all ones": (24, b"\xff" * 8, "table"),
    "one buffer more": (24, b"\3", ""),
    "one buffer less": (24, b"\1", ""),
}


@pytest.mark.guarantee("C10")
@pytest.mark.parametrize("name", PREFIXES)
def test_a_malformed_prefix_is_refused(name: str) -> None:
    """Each field of the prefix is checked."""
    offset, value, reason = PREFIXES[name]
    frame = bytearray(encode([b"x" * 3000, b"y" * 3000]).to_bytes())
    frame[offset : offset + len(value)] = value
    assert reason in refused(bytes(frame))


@pytest.mark.guarantee("C10")
def test_malformed_tables_are_refused() -> None:
    """Buffer lengths that are too short, too long or huge, and padding other than zero, are refused."""
    message = encode([b"x" * 3000, b"y" * 3000])
    table = len(message.header) - 16
    for nbytes in (0, 2999, 3100, 1 << 40, (1 << 56) - 1, (1 << 56) - 64):
        frame = bytearray(message.to_bytes())
        struct.pack_into("<Q", frame, table, nbytes | BYTES << 56)
        assert "buffer" in refused(bytes(frame)) or "padding" in refused(bytes(frame))
    for entry in (3000, (1 << 64) - 1, (1 << 64) - 64):
        frame = bytearray(message.to_bytes())
        struct.pack_into("<Q", frame, table, entry)
        refused(bytes(frame))
    frame = bytearray(message.to_bytes())
    frame[len(message.header) + 3000] = 1
    assert "padding" in refused(bytes(frame))
    longer = bytearray(frame_of(ext(5, b""), b"abc") + b"d")
    struct.pack_into("<Q", longer, 8, len(longer))
    assert "after the last buffer" in refused(bytes(longer))
    assert "does not use" in refused(frame_of(b"\1", b"abc"))


class Gadget:
    """An object that an unpickler would turn into a call."""

    def __reduce__(self) -> Any:
        """Return a call that leaves a trace."""
        return os.system, ("touch gadget-ran",)


@pytest.mark.guarantee("C11")
def test_pickles_are_refused_without_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickled gadgets, bare or inside a frame, are refused or stay plain bytes; no code runs."""
    monkeypatch.chdir(tmp_path)

    def forbidden(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("somebody unpickled")

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        payload = pickle.dumps(Gadget(), protocol)
        with monkeypatch.context() as patch:
            patch.setattr(pickle, "loads", forbidden)
            patch.setattr(pickle, "load", forbidden)
            refused(payload)
            refused(frame_of(payload))
            refused(frame_of(hook(19, "nt.system", packed(payload))))
            refused(frame_of(array("|O8", [len(payload) // 8], payload[: len(payload) // 8 * 8])))
            assert decode(encode(payload).to_bytes()) == payload
    assert not list(tmp_path.iterdir())


@pytest.mark.guarantee("C11")
def test_no_class_is_built_by_name_alone() -> None:
    """Names of callables or unregistered dataclasses in loaded modules are never resolved."""

    @dataclasses.dataclass
    class Sensitive:
        path: str

    module = sys.modules[__name__]
    module.Sensitive = Sensitive  # type: ignore[attr-defined]
    for name in (
        f"{__name__}.Sensitive",
        f"{__name__}:Sensitive",
        "subprocess.Popen",
        "builtins.eval",
        "os.system",
    ):
        for code in (18, 19):
            refused(frame_of(hook(code, name, packed({"path": "/"}))))
            refused(frame_of(hook(code, name, packed("path"))))


BOMBS = {
    "empty dicts": b"\xdd" + struct.pack(">I", 50_000) + b"\x80" * 50_000,
    "empty lists": b"\xdd" + struct.pack(">I", 50_000) + b"\x90" * 50_000,
    "nested claims": b"".join(b"\xdd" + struct.pack(">I", 400_000) for _ in range(200)) + bytes(450_000),
    "empty sets": b"\xdc" + struct.pack(">H", 9000) + ext(2, b"\x90") * 9000,
    "empty deques": b"\xdc" + struct.pack(">H", 9000) + hook(20, None, b"\x90") * 9000,
    "empty defaultdicts": b"\xdc" + struct.pack(">H", 9000) + hook(21, None, b"\x80") * 9000,
    "empty exceptions": b"\xdc" + struct.pack(">H", 9000) + hook(31, "", b"\x91\xa0") * 9000,
    "exceptions with notes": b"\xdc" + struct.pack(">H", 900) + hook(31, "", b"\x9f" + b"\xa0" * 15) * 900,
    "empty namespaces": b"\xdc" + struct.pack(">H", 9000) + hook(35, None, b"\x80") * 9000,
    "empty packed arrays": b"\xdc" + struct.pack(">H", 9000) + hook(36, "q", b"\xc4\0") * 9000,
    "ranges": b"\xdc" + struct.pack(">H", 9000) + hook(33, None, b"\x93\1\1\1") * 9000,
    "empty wide arrays": b"\xdc" + struct.pack(">H", 900) + array("<U99999999", [0], b"") * 900,
    "wide text": b"\xdb" + struct.pack(">I", 400_004) + b"a" * 400_000 + "🎉".encode(),
    "long integers": b"\xdc" + struct.pack(">H", 60_000) + b"\xcf" + b"\xff" * 8 + b"\xcd\1\1" * 59_999,
    "a buffer of a huge shape": array("<i4", [1 << 40], b""),
    "surrogates": ext(7, b"\xed\xa0\x80" * 100_000),
}


@pytest.mark.guarantee("C12")
@pytest.mark.parametrize("name", BOMBS)
def test_memory_is_bounded_by_what_arrived(name: str) -> None:
    """Decoding takes at most a fixed multiple of the bytes received."""
    frame = frame_of(BOMBS[name])
    tried(frame)
    tracemalloc.start()
    try:
        tried(frame)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < PER_BYTE * len(frame) + 65536, peak / len(frame)


@pytest.mark.guarantee("C12")
def test_bombs_are_harmless_under_a_memory_limit(tmp_path: Path) -> None:
    """With little memory to spare, hostile frames still raise DecodeError."""
    names = [name for name, (tree, _) in TREES.items() if len(tree) < 10_000]
    frames = [frame_of(TREES[name][0]) for name in names] + [frame_of(BOMBS["nested claims"])]
    blob = tmp_path / "frames"
    blob.write_bytes(b"".join(struct.pack("<Q", len(frame)) + frame for frame in frames))
    code = (
        "import resource, struct, sys, torch, numpy\n"
        "from shm_broadcast.codec import decode, encode\n"
        "from shm_broadcast.errors import DecodeError\n"
        "import tests.unit.shm_broadcast.codec_samples\n"
        "data = open(sys.argv[1], 'rb').read(); decode(encode([torch.ones(2), numpy.ones(2)]).to_bytes())\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)\n"
        "while data:\n"
        "    size = struct.unpack_from('<Q', data)[0]; frame = data[8:8 + size]; data = data[8 + size:]\n"
        "    try: decode(frame)\n"
        "    except DecodeError: pass\n"
        "    else: raise SystemExit(frame[:80])\n"
        "assert decode(encode([1]).to_bytes()) == [1]\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(blob)], check=True, timeout=120, cwd=Path(__file__).parents[2]
    )
    assert resource.getrlimit(resource.RLIMIT_AS)


@pytest.mark.guarantee("C12")
@pytest.mark.parametrize("kind", ["set", "dict"])
def test_keys_built_to_collide_are_refused_at_once(kind: str) -> None:
    """A hundred thousand keys with one hash are refused at the 129th."""
    step = (1 << 61) - 1
    keys = [hook(16, None, packed((((1 << 64) + n) * step).to_bytes(20, "little"))) for n in range(100_000)]
    head = struct.pack(">I", len(keys))
    tree = (
        ext(2, b"\xdd" + head + b"".join(keys))
        if kind == "set"
        else b"\xdf" + head + b"\1".join([*keys, b""])
    )
    assert "share one hash" in refused(frame_of(tree))


@pytest.mark.guarantee("C16")
def test_ever_new_values_of_a_flag_do_not_fill_the_memory() -> None:
    """Each composite stays in the class for ever, so messages add 4,096 at most; what is there is still carried."""
    name = f"{Loose.__module__}:Loose"
    for value in range(1 << 40, (1 << 40) + 20_000):
        tried(frame_of(hook(18, name, packed(value))))
    assert len(Loose._value2member_map_) <= 4096 + len(Loose)
    assert "messages add no more" in refused(frame_of(hook(18, name, packed(1 << 50))))
    sent = [Loose.ONE | Loose.TWO, Loose.FOUR, Loose(1 << 40), Loose(1 << 51)]
    assert decode(encode(sent).to_bytes()) == sent


@pytest.mark.guarantee("C1")
def test_every_combination_of_twelve_members_is_carried() -> None:
    """The receiver need not have used any of them before."""
    name = f"{Known.__module__}:Known"
    assert len(Known._value2member_map_) == 12
    for value in range(1 << 12):
        assert decode(frame_of(hook(18, name, packed(value)))) is Known(value)
