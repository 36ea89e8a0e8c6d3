"""What an engine's class offers and ours lacks is found and named."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from coordinator.integrations.surface import attributes, gaps, lacking, mismatch, signatures


class Stock:
    name = "stock"

    def __init__(self, ranks: Any, backend: Any = "gloo") -> None:
        """Take two arguments."""

    def reduce(self, tensor: Any, op: Any = None) -> None:
        """Take an optional argument."""

    def named(self, tensor: Any, *, tag: Any = 0) -> None:
        """Take an argument by name only."""

    @staticmethod
    def made_from(handle: Any, rank: int) -> None:
        """Be called without an instance."""

    @property
    def first(self) -> int:
        """Be no method."""
        return 0

    def _private(self, anything: Any) -> None:
        """Be of no concern."""


class Same(Stock):
    def reduce(self, tensor: Any, op: Any = None, *, timeout_s: Any = None) -> None:
        """Take more, by name."""

    @classmethod
    def made_from(cls, handle: Any, rank: int) -> None:
        """Be called without an instance, too."""


def test_a_class_with_more_has_no_gaps() -> None:
    """Further keyword parameters and a classmethod for a staticmethod are no gap."""
    assert gaps(signatures(Stock), Same) == []


def test_signatures_leave_out_what_is_private() -> None:
    """Names with an underscore are the engine's own business."""
    assert set(signatures(Stock)) == {"__init__", "name", "named", "reduce", "made_from", "first"}


@pytest.mark.parametrize(
    ("member", "value", "text"),
    [
        ("reduce", lambda self, tensor: None, "takes (tensor), not (tensor, op=)"),
        ("reduce", lambda self, op, tensor: None, "takes (op, tensor), not (tensor, op=)"),
        ("made_from", lambda self, handle: None, "takes (handle), not (handle, rank)"),
        ("__init__", lambda self, backend="x": None, "__init__ takes (backend=), not (ranks, backend=)"),
        ("reduce", lambda self, tensor, op: None, "takes (tensor, op), not (tensor, op=)"),
        (
            "reduce",
            lambda self, tensor, op=None, *, tag: None,
            "takes (tensor, op=, *tag), not (tensor, op=)",
        ),
        ("reduce", lambda self, tensor, *, op=None: None, "takes (tensor, *op=), not (tensor, op=)"),
        ("named", lambda self, tensor: None, "takes (tensor), not (tensor, *tag=)"),
        ("first", lambda self: 0, "first is a method"),
        ("reduce", property(lambda self: 0), "reduce is no method"),
    ],
)
def test_a_difference_is_named(member: str, value: Any, text: str) -> None:
    """Another parameter, another order, and a property for a method are each named."""
    ours = type("Ours", (Stock,), {member: value})
    (gap,) = gaps(signatures(Stock), ours)
    assert text in gap


def test_a_missing_name_is_named_unless_nobody_uses_it() -> None:
    """A method that ours lacks is a gap, unless the caller says that it is not used."""

    class Ours:
        def __init__(self, ranks: Any, backend: Any = None) -> None:
            """Take the same."""

        name = first = 0

        def named(self, tensor: Any, *, tag: Any = 0) -> None:
            """Take the same."""

        def reduce(self, tensor: Any, op: Any = None) -> None:
            """Take the same."""

    assert gaps(signatures(Stock), Ours) == ["Ours has no made_from"]
    assert gaps(signatures(Stock), Ours, {"made_from"}) == []


# --- what objects have beside their methods -------------------------------------------------------------------


class Base:
    declared: int

    def __init__(self, other: Any) -> None:
        self.plain = other
        self.annotated: int = 1
        self.first, self.second = other
        other.elsewhere = self._private = 1

    @property
    def asked(self) -> int:
        """Be a member of the class, which `signatures` returns."""
        self.counted = 1
        return 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Be wrapped by a decorator."""
        self.entered = value = True
        yield
        self.left = value


class Derived(Base):
    @classmethod
    def made(cls) -> Any:
        """Name an object as its methods do."""
        self: Any = cls.__new__(cls)
        self.kind = "made"
        return self


def test_what_objects_get_is_found_without_an_object() -> None:
    """Declarations and assignments to `self` count, in any method and in the bases; those to other objects do not."""
    found = {"declared", "plain", "annotated", "first", "second", "counted", "entered", "left"}
    assert attributes(Base) == found
    assert attributes(Derived) == {*found, "kind"}


def test_what_objects_lack_is_named() -> None:
    """An attribute of the engine's objects may be an attribute, a property or a method of ours."""
    wanted = {"plain", "asked", "held", "kind", "zone"}
    assert lacking(wanted, Derived) == ["Derived has no attribute zone"]
    assert lacking(wanted, Base) == ["Base has no attribute kind", "Base has no attribute zone"]
    assert lacking(wanted, Base, {"zone", "kind"}) == []


def test_a_call_that_does_not_fit_is_named() -> None:
    """Further parameters must have defaults; a method is looked up in its class."""
    assert mismatch(Stock.reduce, "reduce", ("tensor",)) is None
    assert mismatch(Stock.reduce, "reduce", ()) == "reduce takes (tensor, op=), not ()"
    assert mismatch(lambda: 0, "get", ()) is None
    assert mismatch(lambda kind: 0, "get", ()) == "get takes (kind), not ()"
