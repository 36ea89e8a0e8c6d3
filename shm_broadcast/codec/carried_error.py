"""Send exceptions as what they say: the name of the class, the text and the notes.

The class of an exception is never built from a message: its constructor is code, and its arguments are the peer's.
"""

from typing import Any

from shm_broadcast.codec.adapters import expect
from shm_broadcast.codec.wire_format import Code, Description
from shm_broadcast.errors import DecodeError

__all__ = ["CarriedError", "build_exception", "describe_exception"]


class CarriedError(Exception):
    """An exception that a peer has sent, of whatever class it was there.

    Its `str` is the name of the class and the text, its `__notes__` are the notes. The traceback and the cause stay
    with the peer, unless the peer has added them as a note.

    Attributes:
        type_name: Qualified name of the class in the peer, with its module unless that is `builtins`.
        text: What `str` gave for the exception in the peer.
    """

    def __init__(self, type_name: str, text: str) -> None:
        """Store the name and the text."""
        super().__init__(type_name, text)
        self.type_name = type_name
        self.text = text

    def __str__(self) -> str:
        """Return the name of the class and the text."""
        return f"{self.type_name}: {self.text}" if self.text else self.type_name


def describe_exception(obj: BaseException) -> Description:
    """Describe an exception by the name of its class, its text and its notes."""
    notes: Any = getattr(obj, "__notes__", [])
    texts = [str(note) for note in notes] if isinstance(notes, (list, tuple)) else [str(notes)]
    if type(obj) is CarriedError:
        return Code.EXCEPTION, obj.type_name, [obj.text, *texts]
    cls = type(obj)
    prefix = "" if cls.__module__ == "builtins" else f"{cls.__module__}."
    return Code.EXCEPTION, f"{prefix}{cls.__qualname__}", [str(obj), *texts]


def build_exception(meta: object, body: object) -> CarriedError:
    """Return a `CarriedError` for a class named `meta`, with the text and the notes in `body`.

    Raises:
        DecodeError: The name, the text or a note is no str.
    """
    texts = expect(list, body, "an exception")
    if not texts or any(type(text) is not str for text in texts):
        raise DecodeError("an exception needs its text and its notes")
    error = CarriedError(expect(str, meta, "the class of an exception"), texts[0])
    for note in texts[1:]:
        error.add_note(note)
    return error
