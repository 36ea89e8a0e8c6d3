"""A discrete-event model: thousands of ranks ask one process, which answers one request after the other."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks.start_simulation.costs import Costs
from benchmarks.start_simulation.requests import WAKING, Request, Round

__all__ = ["Network", "Start", "simulate"]

# A rank opens one connection for everything and one to wait in agreements.
CONNECTIONS: Final = 2


@dataclasses.dataclass(frozen=True)
class Network:
    """What is between the ranks and the process that serves the store.

    Attributes:
        one_way_s: From the sending of a small message to its arrival.
        bytes_per_s: What the server's link carries, in each direction.
    """

    one_way_s: float = 50e-6
    bytes_per_s: float = 1.25e9


@dataclasses.dataclass(frozen=True)
class Start:
    """A simulated start.

    Attributes:
        over_s: By agreement: seconds from the coming of the last rank until the last one knows that all agree.
        requests: What a rank asks, at most, but for the one that comes last; connections and looks are left out.
        received: Bytes that it gets.
        busy: The server's part of the time from the coming of the last rank on, 0 to 1.
    """

    over_s: tuple[float, ...]
    requests: int
    received: int
    busy: float


# What a rank does next: compute for some seconds, open a connection, ask for something, or say that it knows.
_Compute = float
_Step = _Compute | Request | str
_CONNECT: Final = "connect"
_KNOWS: Final = "knows"


class _World:
    """All ranks, the server and its link."""

    def __init__(
        self, rounds: Sequence[Round], costs: Costs, network: Network, ranks: int, cores: int | None
    ) -> None:
        self._rounds = rounds
        self._costs = costs
        self._network = network
        self._ranks = ranks
        self._core_free_s = None if cores is None else [0.0] * cores
        self._came = [0] * len(rounds)
        self._known_s = [0.0] * len(rounds)
        self._is_over = [False] * len(rounds)
        self._waiting: list[list[tuple[int, Request]]] = [[] for _ in rounds]
        self._round_of = [0] * ranks
        self._server_free_s = self._link_free_s = 0.0
        self._busy: list[tuple[float, float]] = []
        self._events: list[tuple[float, int, int, Request | str | None]] = []
        self._number = 0

    def run(self, coming_s: Sequence[float]) -> tuple[list[float], float]:
        """Let each rank come at its time; return when all knew of each agreement, and the server's busy part."""
        steps = [self._steps(rank) for rank in range(self._ranks)]
        for rank, at_s in enumerate(coming_s):
            self._add(at_s, rank, None)
        last_s = max(coming_s)
        while self._events:
            now_s, _, rank, arrived = heapq.heappop(self._events)
            if arrived is not None:
                self._serve(now_s, rank, arrived)
                continue
            step = next(steps[rank], None)
            if step == _KNOWS:
                number = self._round_of[rank]
                self._known_s[number] = max(self._known_s[number], now_s)
                self._round_of[rank] += 1
                self._add(now_s, rank, None)
            elif isinstance(step, float):
                self._add(self._computed_s(now_s, step), rank, None)
            elif step is not None:
                self._add(now_s + self._network.one_way_s, rank, step)
        end_s = self._known_s[-1]
        busy_s = sum(max(min(until, end_s) - max(since, last_s), 0.0) for since, until in self._busy)
        return [known_s - last_s for known_s in self._known_s], busy_s / (end_s - last_s)

    def _add(self, at_s: float, rank: int, arrived: Request | str | None) -> None:
        self._number += 1
        heapq.heappush(self._events, (at_s, self._number, rank, arrived))

    def _steps(self, rank: int) -> Iterator[_Step]:
        """Yield what a rank does, one thing behind the other."""
        for _ in range(CONNECTIONS):
            yield _CONNECT
        for number, each in enumerate(self._rounds):
            yield self._costs.thread_s
            yield from self._asking(each.first if rank == 0 else each.others)
            self._came[number] += 1
            is_last = self._came[number] == self._ranks
            yield from self._asking(each.ending if is_last else each.told)
            yield each.ending_s if is_last else each.told_s
            yield _KNOWS
            if each.behind:
                yield self._costs.thread_s
                yield from self._asking(each.behind)

    def _asking(self, requests: Sequence[Request]) -> Iterator[_Step]:
        for request in requests:
            yield request.before_s + self._costs.asking_s
            yield request

    def _computed_s(self, now_s: float, seconds: float) -> float:
        """Return when a rank that begins now has computed for some seconds."""
        if self._core_free_s is None:
            return now_s + seconds
        end_s = max(heapq.heappop(self._core_free_s), now_s) + seconds
        heapq.heappush(self._core_free_s, end_s)
        return end_s

    def _serve(self, now_s: float, rank: int, arrived: Request | str) -> None:
        costs = self._costs
        if isinstance(arrived, str):
            self._answer(now_s, rank, costs.connection_s, 0)
            return
        number = self._round_of[rank]
        if arrived.kind == "wait" and not self._is_over[number]:
            # What it costs to take the request is part of the cost of the wake.
            self._waiting[number].append((rank, arrived))
            return
        seconds = costs.request_s + (arrived.keys - 1) * costs.key_s
        seconds += arrived.sent * costs.byte_in_s + arrived.received * costs.byte_out_s
        self._answer(now_s, rank, seconds, arrived.received)
        if arrived.kind == WAKING:
            self._is_over[number] = True
            for waiting, request in self._waiting[number]:
                self._answer(now_s, waiting, costs.wake_s, request.received)

    def _answer(self, now_s: float, rank: int, seconds: float, nbytes: int) -> None:
        """Let the server work for a rank, and its answer go over the link."""
        begin_s = max(now_s, self._server_free_s)
        self._server_free_s = begin_s + seconds
        self._busy.append((begin_s, self._server_free_s))
        self._link_free_s = max(self._server_free_s, self._link_free_s) + nbytes / self._network.bytes_per_s
        self._add(self._link_free_s + self._network.one_way_s, rank, None)


def simulate(
    rounds: Sequence[Round],
    costs: Costs,
    ranks: int,
    late_s: float,
    network: Network | None = None,
    cores: int | None = None,
) -> Start:
    """Let `ranks` ranks start, the last one `late_s` seconds behind the others, which come at once.

    Args:
        rounds: What they ask, recorded for as many ranks.
        costs: What that costs.
        ranks: Their number.
        late_s: See above.
        network: Default: 50 us one way, 10 Gbit/s.
        cores: How many of them can compute at the same time; None: each has a processor of its own.
    """
    world = _World(rounds, costs, network or Network(), ranks, cores)
    over_s, busy = world.run([0.0] * (ranks - 1) + [late_s])
    asked = [request for each in rounds for request in (*each.others, *each.told, *each.behind)]
    return Start(tuple(over_s), len(asked), sum(request.received for request in asked), busy)
