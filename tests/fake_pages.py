"""Pages of a job whose ranks never ran, for what reads pages: groups, calls in progress and calls that have ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from coordinator.diagnosis.blame.evidence import Process
from coordinator.diagnosis.model import Group, Lane, Page, Queue, Record

__all__ = ["SECOND", "FakeRank"]

SECOND = 1_000_000_000
# A page names so many members of a group.
_SHOWN = 256


class FakeRank:
    """Builds the page of one rank. Each call takes a second of its clock, which begins anywhere."""

    def __init__(
        self, rank: int, world_size: int, *, host: str = "node1", began_s: int | None = None
    ) -> None:
        """Start with no group."""
        self.rank = rank
        self.world_size = world_size
        self.host = host
        self.now_ns = (1000 + 77 * rank if began_s is None else began_s) * SECOND
        self._groups: dict[str, dict[str, Any]] = {}
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._records: list[Record] = []
        self._queues: list[Queue] = []
        self._began_ns = self.now_ns
        self._before: Page | None = None

    def after(self, left: FakeRank) -> FakeRank:
        """Show the groups and calls of `left` too: what the process did before it made the groups of this one."""
        self._before = left.page()
        return self

    def group(
        self, name: str, ranks: Sequence[int], state: str = "usable", place: int | None = None
    ) -> FakeRank:
        """Be in a group, or change its state; `place` is that of its rank by default."""
        at = tuple(ranks).index(self.rank) if place is None else place
        self._groups[name] = {"ranks": tuple(ranks), "state": state, "place": at}
        return self

    def calls(self, group: str, *names: str, plane: str = "shared", **words: Any) -> FakeRank:
        """Make calls one after the other, and end them."""
        for name in names:
            self.enter(group, name, plane=plane, **words)
            self.end(group, plane=plane)
        return self

    def enter(self, group: str, name: str, *, plane: str = "shared", **words: Any) -> FakeRank:
        """Begin a call and stay in it."""
        self.now_ns += SECOND // 2
        before = self._lanes.get((group, plane))
        number = 0 if plane.endswith(" waits") else (before.number if before else 0) + 1
        given: dict[str, Any] = {
            "plane": plane,
            "algorithm": "shared memory" if plane.startswith("shared") else "process group",
            "state": "asleep",
            "call": name,
            "number": number,
            "count": 16,
            "nbytes": 64,
            "root": None,
            "dtype": 1,
            "op": 0,
            "detail": 0,
            "begin_ns": self.now_ns,
            "end_ns": before.end_ns if before else 0,
            "is_torn": False,
            "counters": (),
        }
        self._lanes[group, plane] = Lane(**{**given, **words})
        return self

    def end(
        self,
        group: str,
        outcome: str = "done",
        *,
        plane: str = "shared",
        last: int | None = None,
        late_ns: int = 0,
    ) -> FakeRank:
        """End the call."""
        self.now_ns += SECOND // 2
        lane = self._lanes[group, plane]
        words = {name: getattr(lane, name) for name in lane.__struct_fields__}
        self._lanes[group, plane] = Lane(**{**words, "state": "idle", "end_ns": self.now_ns})
        shared = (
            "plane",
            "algorithm",
            "call",
            "number",
            "count",
            "dtype",
            "op",
            "root",
            "detail",
            "begin_ns",
        )
        self._records.append(
            Record(
                index=len(self._records) + 1,
                group=group,
                epoch=0,
                end_ns=self.now_ns,
                last=last,
                waited_ns=0,
                late_ns=late_ns,
                outcome=outcome,
                **{name: words[name] for name in shared},
            )
        )
        return self

    def queue(self, name: str, inode: int, reader: int) -> FakeRank:
        """Hold an end of a queue."""
        self._queues.append(Queue(name=name, inode=inode, offset=0, reader=reader, descriptor=9))
        return self

    def page(self) -> Page:
        """Return the page."""
        before = self._before
        groups = () if before is None else before.groups
        records = () if before is None else before.records
        groups += tuple(
            Group(
                name=name,
                state=group["state"],
                epoch=0,
                place=group["place"],
                world_size=len(group["ranks"]),
                ranks=group["ranks"][:_SHOWN],
                created_ns=1 if before is None else self._began_ns,
                cause="",
                is_torn=False,
                lanes=tuple(lane for (of, _), lane in self._lanes.items() if of == name),
            )
            for name, group in self._groups.items()
        )
        return Page(
            pid=4000 + self.rank,
            start_ticks=1,
            pid_namespace=1,
            time_namespace=1,
            boot_id=f"boot of {self.host}",
            hostname=self.host,
            rank=self.rank,
            world_size=self.world_size,
            stack_signal=0,
            refused=0,
            created_ns=1,
            realtime_ns=0,
            calls=len(records) + len(self._records),
            groups=groups,
            queues=tuple(self._queues),
            records=(
                *records,
                *(msgspec.structs.replace(each, index=len(records) + each.index) for each in self._records),
            ),
        )

    def process(self, **words: Any) -> Process:
        """Return the process as it is seen a second later."""
        return Process(page=self.page(), **{"now_ns": self.now_ns + SECOND, **words})
