"""How an agreement ends: the outcome in the store, which is written once and which all ranks read.

| key | value |
|---|---|
| `proposal` | the rank that came first, and a digest of its facts |
| `facts/<digest>` | the facts themselves, if the first rank holds them or another one contradicts it |
| `outcome` | one of the structs below; the first one counts |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
import torch.distributed as dist

from coordinator.settings import differences
from shm_broadcast.errors import (
    CapabilityError,
    CommError,
    CommTimeoutError,
    DisagreementError,
    GroupBrokenError,
    PeerLostError,
)

__all__ = [
    "KEY",
    "Broken",
    "Complete",
    "Dissent",
    "Failure",
    "Left",
    "Missing",
    "Outcome",
    "Proposal",
    "Refused",
    "decide",
    "facts_of",
    "propose",
    "read",
    "show_facts",
]

KEY: Final = "outcome"


class Proposal(msgspec.Struct, frozen=True):
    """The first rank that came, and a digest of its facts."""

    rank: int
    digest: str


class Complete(msgspec.Struct, frozen=True, tag="complete"):
    """All ranks have come with the same facts.

    Attributes:
        places: Where they are; see `Places.encode`.
    """

    places: bytes


class Dissent(msgspec.Struct, frozen=True, tag="dissent"):
    """Ranks hold different facts.

    Attributes:
        came: How many ranks had come when it was written, who wait to read it; 0 if that is not known.
        held: The facts, by rank, of those that had come.
    """

    came: int
    held: dict[int, dict[str, str]]

    def error(self, where: str, timeout_s: float) -> CommError:
        """Return an error with the facts of each rank; `where` begins its text, also in the other failures."""
        views = {
            rank: msgspec.json.encode(facts, order="deterministic").decode()
            for rank, facts in sorted(self.held.items())
        }
        return DisagreementError(f"{where}: ranks disagree: {'; '.join(differences(self.held))}", views=views)


class Left(msgspec.Struct, frozen=True, tag="left"):
    """A rank was interrupted, or processes have ended.

    Attributes:
        came: As of `Dissent`.
        ranks: The ranks, ascending.
        reason: What happened to them, as the end of a sentence: `was interrupted (KeyboardInterrupt) and has left`.
    """

    came: int
    ranks: list[int]
    reason: str

    def error(self, where: str, timeout_s: float) -> CommError:
        """Return an error that names the ranks."""
        listed = ", ".join(str(rank) for rank in self.ranks)
        noun = "rank" if len(self.ranks) == 1 else "ranks"
        return PeerLostError(f"{where}: {noun} {listed} {self.reason}", peers=self.ranks)


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """A failure has broken the group whose ranks create a further one. A rank that finds its record raises that.

    Attributes:
        came: As of `Dissent`.
        reason: The error of the rank that has written this.
        ranks: The ranks at fault, if that error names any.
    """

    came: int
    reason: str
    ranks: list[int]

    def error(self, where: str, timeout_s: float) -> CommError:
        """Return an error with the reason, which names the same ranks."""
        text = f"{where}: {self.reason}"
        return PeerLostError(text, peers=self.ranks) if self.ranks else GroupBrokenError(text)


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A rank cannot take part.

    Attributes:
        came: As of `Dissent`.
        rank: The rank.
        reason: Its error.
    """

    came: int
    rank: int
    reason: str

    def error(self, where: str, timeout_s: float) -> CommError:
        """Return an error that names the rank and its reason."""
        return CapabilityError(
            f"{where}: rank {self.rank} cannot take part: {self.reason}",
            requirement="a rank that can take part",
        )


class Missing(msgspec.Struct, frozen=True, tag="missing"):
    """Ranks did not come in time.

    Attributes:
        came: As of `Dissent`.
        ranks: The ranks.
    """

    came: int
    ranks: list[int]

    def error(self, where: str, timeout_s: float) -> CommError:
        """Return an error that names the ranks."""
        listed = ", ".join(str(rank) for rank in self.ranks)
        return CommTimeoutError(
            f"{where}: rank(s) {listed} did not join within {timeout_s:.1f} s; check that they were "
            "started with the same rendezvous, and that all ranks create their groups in the same order",
            missing=self.ranks,
        )


# Why the ranks do not agree. `error` returns what a rank raises, whose text begins with where it is.
Failure = Dissent | Left | Broken | Refused | Missing
Outcome = Complete | Failure

_outcome_decoder: Final = msgspec.json.Decoder(Outcome)
_proposal_decoder: Final = msgspec.json.Decoder(Proposal)
_facts_decoder: Final = msgspec.json.Decoder(dict[str, str])


def propose(store: dist.Store, rank: int, digest: str) -> Proposal:
    """Propose a digest, unless another rank has; return the proposal that counts."""
    own = msgspec.json.encode(Proposal(rank, digest)).decode()
    return _proposal_decoder.decode(store.compare_set("proposal", "", own))


def decide(store: dist.Store, outcome: Outcome) -> Outcome:
    """Set the outcome for all ranks unless it is set already; return the outcome that counts."""
    counts = store.compare_set(KEY, "", msgspec.json.encode(outcome).decode()).decode()
    # torch's store wakes those that wait for a key when it is set, and not when it is compared and set.
    store.set(KEY, counts)
    decided: Outcome = _outcome_decoder.decode(counts)
    return decided


def read(store: dist.Store) -> Outcome:
    """Return the outcome, which is set."""
    outcome: Outcome = _outcome_decoder.decode(store.get(KEY))
    return outcome


def show_facts(store: dist.Store, digest: str, facts: Mapping[str, str]) -> None:
    """Publish the facts that a digest stands for."""
    store.set(f"facts/{digest}", msgspec.json.encode(facts).decode())


def facts_of(store: dist.Store, digest: str) -> dict[str, str]:
    """Return the facts that a digest stands for; none if the rank that holds them has not shown them."""
    key = f"facts/{digest}"
    return _facts_decoder.decode(store.get(key)) if store.check([key]) else {}
