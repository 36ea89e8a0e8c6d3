"""What a launcher has told one process, and how its variables are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NoReturn

import msgspec

from shm_broadcast.errors import UsageError

__all__ = ["MOST_RANKS", "Caller", "Launch", "Variables"]

MOST_RANKS: Final = 2**31 - 1


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller of `init_distributed_environment` knows itself, -1 where it does not. It beats the launcher.

    Attributes:
        rank: This process's global rank.
        world_size: Number of processes.
        local_rank: Index of this process on its host.
        local_world_size: Number of processes per host.
        port: TCP port of the store.
    """

    rank: int = -1
    world_size: int = -1
    local_rank: int = -1
    local_world_size: int = -1
    port: int = -1


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The place of one process in its world, and where rank 0 serves the store.

    Attributes:
        launcher: Who has started the process, for texts.
        rank: Global rank.
        world_size: Number of processes.
        local_rank: Index of the process on its host.
        host: Name or address of rank 0's host.
        port: TCP port of the store.
        spans_hosts: Whether the processes are on several hosts, as far as the launcher says; in Kubernetes a pod counts
            as a host.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    host: str
    port: int
    spans_hosts: bool

    @property
    def init_method(self) -> str:
        """Return the store's address as `tcp://HOST:PORT`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


class Variables:
    """The variables of one launcher. What is missing, malformed or contradictory is named with who sets it."""

    def __init__(self, environ: Mapping[str, str], init_method: str, launcher: str) -> None:
        """Read from `environ`.

        Args:
            environ: The process's variables, those of other launchers too.
            init_method: How the user asked for this launcher, for errors.
            launcher: What sets the variables, for errors: "srun".
        """
        self._environ = environ
        self._init_method = init_method
        self._launcher = launcher

    def text(self, name: str, instead: str = "") -> str:
        """Return a variable that is needed.

        Args:
            name: The variable.
            instead: What the caller can do where the launcher does not set it, as the end of a sentence.

        Raises:
            UsageError: It is missing or empty.
        """
        value = self._environ.get(name, "")
        if not value:
            self.refuse(f"the environment variable {name} is missing, which {self._launcher} sets", instead)
        return value

    def number(self, name: str, lowest: int, highest: int, instead: str = "") -> int:
        """Return a variable that is needed and holds a number; the arguments are those of `text`.

        Raises:
            UsageError: It is missing, or no integer from `lowest` to `highest`.
        """
        text = self.text(name, instead)
        # `int` alone would also take "1_0", " 1" and digits of other scripts.
        if not (text.isascii() and text.isdecimal() and len(text) <= 10 and lowest <= int(text) <= highest):
            self.refuse(
                f"{self._launcher} has set {name}={text!r}, which must be an integer from {lowest} to {highest}"
            )
        return int(text)

    def optional_number(self, name: str, lowest: int, highest: int) -> int | None:
        """Return a variable that holds a number; None if it is missing or empty.

        Raises:
            UsageError: It is no integer from `lowest` to `highest`.
        """
        return self.number(name, lowest, highest) if self._environ.get(name) else None

    def check_equal(self, first: str, second: str, instead: str = "") -> None:
        """Refuse two variables that say the same thing and are both set, but differ.

        Args:
            first: A variable.
            second: The other one.
            instead: As of `text`.

        Raises:
            UsageError: They differ.
        """
        one, other = self._environ.get(first), self._environ.get(second)
        if one and other and one != other:
            self.refuse(
                f"{first}={one!r} and {second}={other!r} contradict each other: {self._launcher} sets both alike",
                instead,
            )

    def refuse(self, reason: str, instead: str = "") -> NoReturn:
        """Refuse the environment.

        Raises:
            UsageError: Always.
        """
        raise UsageError(f"{self._init_method}: {reason}{f'; {instead}' if instead else ''}")


def place(variables: Variables, caller: Caller, names: tuple[str, str, str]) -> tuple[int, int, int]:
    """Return rank, world size and local rank, from the caller or else from the variables with these names.

    Raises:
        UsageError: A variable that is needed is missing or malformed, or the numbers do not fit each other.
    """
    rank_name, size_name, local_name = names
    size = caller.world_size if caller.world_size >= 0 else variables.number(size_name, 1, MOST_RANKS)
    if size < 1 or caller.rank >= size:
        variables.refuse(f"there is no rank {caller.rank} among {size} processes")
    rank = caller.rank if caller.rank >= 0 else variables.number(rank_name, 0, size - 1)
    if caller.local_rank >= 0:
        return rank, size, caller.local_rank
    return rank, size, variables.number(local_name, 0, size - 1, "pass local_rank")
