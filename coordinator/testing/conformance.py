"""The conformance suite: checks that any implementation of `DeviceCommunicator` keeps the contract."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

import torch

from coordinator.testing import conformance_inputs as inputs
from coordinator.testing.conformance_inputs import Case
from device_comm.base import DeviceCommunicator
from shm_broadcast.errors import UsageError

# A violated clause, the call that violates it, and what was found.
Finding: TypeAlias = tuple[str, str, str]

# The methods that give all ranks the same result.
_SAME_EVERYWHERE: Final = ("all_reduce", "all_gather", "all_gatherv")

# Number of recent results that are kept alive, to detect later calls that write into them.
_KEPT_RESULTS: Final = 12


class ObjectExchange(Protocol):
    """Exchanges objects between the ranks of a group; a `GroupCoordinator`, for example."""

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's object, in rank order. Collective."""


class ConformanceError(AssertionError):
    """A communicator violates a clause of the contract.

    Attributes:
        clause: `METHOD: ASPECT`, such as `all_reduce: new memory`.
        call: The call that violates it.
        ranks: Ranks in the group that found it, ascending; only this one if the ranks did not exchange findings.
    """

    def __init__(self, message: str, *, clause: str, call: str, ranks: Sequence[int]) -> None:
        """Store the message, the clause, the call and the ranks."""
        super().__init__(message)
        self.clause = clause
        self.call = call
        self.ranks: tuple[int, ...] = tuple(ranks)


class Checker:
    """Calls a communicator and records each violation; raises only at the end of a part, equally on all ranks.

    A rank that raised earlier would leave the others waiting in the next collective.
    """

    def __init__(
        self,
        communicator: DeviceCommunicator,
        dtypes: Sequence[torch.dtype],
        host: ObjectExchange | None,
        *,
        alike: bool,
        exact: bool,
        timeout_s: float,
    ) -> None:
        """Check `communicator`; the arguments are those of `check_device_communicator`."""
        self.communicator = communicator
        self.rank: int = communicator.rank_in_group
        self.world_size: int = communicator.world_size
        self.dtypes: tuple[torch.dtype, ...] = tuple(dtypes)
        self.timeout_s = timeout_s
        self.alike = alike
        self.inputs: inputs.Inputs = inputs.Inputs(self.rank, self.world_size, communicator.device, alike)
        # In a group of one every result is the input itself.
        self._exact = exact or self.world_size == 1
        self._host = host
        self._call = "nothing"
        self._failures: list[Finding] = []
        self._kept: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._bits = hashlib.sha256()

    # ------------------------------------------------------------------ calling and noting

    def begin(self, call: str) -> None:
        """Record the call that comes next: `METHOD(…) of …`."""
        self._call = call

    def fail(self, aspect: str, text: str) -> None:
        """Record that the current call violates the clause `METHOD: aspect`."""
        self._failures.append((f"{self._method}: {aspect}", self._call, text))

    @property
    def _method(self) -> str:
        return self._call.partition("(")[0]

    def reduced(self, case: Case) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the reduction of all ranks' inputs, and the tolerance per element; None requires equal bits."""
        return inputs.reduction(self.inputs.all(case.shape, case.dtype), case.op, exact=self._exact)

    def compute(
        self,
        call: str,
        case: Case,
        run: Callable[[torch.Tensor], torch.Tensor | None],
        expected: torch.Tensor | None,
        slack: torch.Tensor | None = None,
    ) -> None:
        """Make a call with one input and a new result, and check both.

        Args:
            call: Description of the call.
            case: The shape, dtype and layout of this rank's input.
            run: Makes the call.
            expected: Expected result, in host memory; None if the call returns None on this rank.
            slack: Absolute tolerance per element; None requires equal bits.
        """
        self.begin(f"{call} of {case}")
        input_ = inputs.LAYOUTS[case.layout](self.inputs.own(case.shape, case.dtype))
        before = inputs.raw(input_)
        result = run(input_)
        self.check_unchanged(input_, before)
        if self.world_size == 1:
            if result is not input_:
                self.fail("group of one", "in a group of one the result must be the input itself")
            return
        self.check_result(result, expected, slack)
        if isinstance(result, torch.Tensor) and _share_storage(result, input_):
            self.fail("new memory", "the result shares memory with the input")

    def fill(
        self,
        call: str,
        case: Case,
        run: Callable[[torch.Tensor], torch.Tensor],
        expected: torch.Tensor,
        slack: torch.Tensor | None = None,
        source: torch.Tensor | None = None,
    ) -> None:
        """Make a call that fills a tensor and returns it; check the tensor and the memory beside it.

        Args:
            call: Description of the call.
            case: The shape, dtype and layout of the tensor.
            run: Makes the call.
            expected: Values of the tensor after the call, in host memory.
            slack: Absolute tolerance per element; None requires equal bits.
            source: The input of the call, which must stay unchanged; None if the tensor itself is the input.
        """
        self.begin(f"{call} of {case}")
        contents = self.inputs.own(case.shape, case.dtype)
        contents = contents if source is None else torch.zeros_like(contents)
        beside = contents.new_zeros((*case.shape, 2))
        target = beside[..., 1] if case.layout == "strided" else inputs.LAYOUTS[case.layout](contents)
        target.copy_(contents)
        source = contents if source is None else source
        before = inputs.raw(source)
        if run(target) is not target:
            self.fail("returns its argument", "another tensor was returned")
        self.check_values(target, expected, slack)
        if inputs.raw(beside[..., 0]).any():
            self.fail("nothing else written", "memory beside the tensor was changed")
        self.check_unchanged(source, before)

    def check_unchanged(self, input_: torch.Tensor, before: torch.Tensor) -> None:
        """Check that an input of the current call has the bits that `inputs.raw` returned before the call."""
        if not torch.equal(inputs.raw(input_), before):
            self.fail("input unchanged", "the call changed its input")

    def check_result(
        self,
        result: object,
        expected: torch.Tensor | None,
        slack: torch.Tensor | None = None,
    ) -> None:
        """Check the type, shape, dtype, device, layout and values of the current call's result."""
        if expected is None or not isinstance(result, torch.Tensor):
            if expected is not None or result is not None:
                wanted = "None" if expected is None else "a tensor"
                self.fail("shape", f"returned {type(result).__name__}, expected {wanted}")
            return
        if result.shape != expected.shape or result.dtype != expected.dtype:
            self.fail(
                "shape",
                f"returned shape {tuple(result.shape)} and {result.dtype}, "
                f"expected {tuple(expected.shape)} and {expected.dtype}",
            )
            return
        if result.device.type != self.communicator.device.type:
            self.fail("device", f"the result is on {result.device}")
        if not result.is_contiguous() or result.is_conj() or result.is_neg():
            self.fail(
                "contiguous", f"the result has strides {result.stride()} for shape {tuple(result.shape)}"
            )
        self.check_values(result, expected, slack)
        self._keep(result)
        if self._method in _SAME_EVERYWHERE:
            bits = inputs.raw(result)
            self._bits.update(ctypes.string_at(bits.data_ptr(), bits.numel()) if bits.numel() else b"")

    def check_values(
        self, result: torch.Tensor, expected: torch.Tensor, slack: torch.Tensor | None = None
    ) -> None:
        """Check the values of a tensor that has the expected shape."""
        wrong = inputs.difference(result, expected, slack)
        if wrong is not None:
            self.fail("value", wrong)

    def check_refusals(self, attempts: Mapping[str, Callable[[], object]]) -> None:
        """Check that each attempt, by its call, raises `UsageError`, and that the communicator works afterwards."""
        expected, slack = self.reduced(Case((5,), torch.float32))
        for call, attempt in attempts.items():
            self.begin(call)
            try:
                with contextlib.suppress(UsageError):
                    attempt()
                    self.fail("refusal", "was accepted, expected UsageError")
            except Exception as error:  # noqa: BLE001 - the wrong kind of refusal is the finding
                self.fail("refusal", f"raised {type(error).__name__} instead of UsageError: {error}")
            try:
                result = self.communicator.all_reduce(self.inputs.own((5,), torch.float32))
            except Exception as error:  # noqa: BLE001 - any error means that the communicator is unusable
                self.fail("usable after a refusal", f"a later all_reduce raised {error!r}")
                continue
            if result.shape != expected.shape or inputs.difference(result, expected, slack) is not None:
                self.fail("usable after a refusal", "a later all_reduce returned wrong values")

    def _keep(self, result: torch.Tensor) -> None:
        if result.numel() == 0:
            return
        for call, other, _ in self._kept:
            if _share_storage(result, other):
                self.fail("new memory", f"the result shares memory with that of an earlier {call}")
        self._kept.append((self._call, result, inputs.raw(result)))
        del self._kept[:-_KEPT_RESULTS]

    # ------------------------------------------------------------------ the end of a part

    def finish_part(self, name: str, *, exchange: bool = True) -> None:
        """Raise on every rank if any rank found a violation.

        Raises:
            ConformanceError: A rank found a violation; the text names the first.
        """
        for call, result, bits in self._kept:
            if not torch.equal(inputs.raw(result), bits):
                self.begin(call)
                self.fail("new memory", "a later call changed the result")
        self._kept.clear()
        views = self._views(exchange=exchange and not self.alike and self.world_size > 1)
        self._failures.clear()
        self._bits = hashlib.sha256()
        failed = {rank: found for rank, (found, _) in views.items() if found}
        if failed:
            clause, call, text = failed[min(failed)][0]
            more = sum(map(len, failed.values())) - 1
            text += f" (and {more} more)" if more else ""
            raise self._violation(sorted(failed), clause, call, text)
        if len({bits for _, bits in views.values()}) > 1:
            text = "the results have different bits on different ranks"
            raise self._violation(sorted(views), f"{name}: same bits on every rank", name, text)

    def _violation(self, ranks: Sequence[int], clause: str, call: str, text: str) -> ConformanceError:
        where = f"rank(s) {', '.join(map(str, ranks))} of {self.world_size}"
        return ConformanceError(
            f"{type(self.communicator).__name__} violates '{clause}' on {where}: {call}: {text}",
            clause=clause,
            call=call,
            ranks=ranks,
        )

    def _views(self, *, exchange: bool) -> dict[int, tuple[list[Finding], str]]:
        """Return each rank's findings and the digest of its results, by rank."""
        own = (list(self._failures), self._bits.hexdigest())
        if not exchange:
            return {self.rank: own}
        if self._host is not None:
            return dict(enumerate(self._host.all_gather_object(own)))
        # Without a host exchange, the communicator under test carries one flag and the digest.
        note = torch.tensor([bool(self._failures), *self._bits.digest()], dtype=torch.uint8)
        notes = self.communicator.all_gather(note.to(self.communicator.device), 0).cpu().view(-1, len(note))
        elsewhere = ("a clause of the contract", "a call", "that rank's error names it")
        views = {
            rank: ([elsewhere] if failed else [], bytes(bits).hex())
            for rank, (failed, *bits) in enumerate(notes.tolist())
        }
        return {**views, self.rank: own}

    def run_part(self, name: str, part: Callable[[Checker], None], *, exchange: bool = True) -> None:
        """Run one part of the suite.

        Args:
            name: Name of the part.
            part: Makes the calls of the part.
            exchange: Whether the ranks exchange their findings.

        Raises:
            ConformanceError: The communicator violates a clause, or raises where it must not.
        """
        try:
            part(self)
        except Exception as error:
            # An earlier finding may be the cause, so the first one is reported.
            self.fail("no error", f"raised {type(error).__name__}: {error}")
            raise self._violation([self.rank], *self._failures[0]) from error
        self.finish_part(name, exchange=exchange)


def _share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.numel() == 0 or other.numel() == 0:
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
