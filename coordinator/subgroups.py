"""Groups made of a group's ranks, and a group as a process group of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from coordinator.planes import GroupPlanes
from coordinator.settings import CoordinatorSettings
from device_comm import checks
from shm_broadcast.errors import UsageError

if TYPE_CHECKING:
    from coordinator.group import GroupCoordinator


class Subgroups(GroupPlanes):
    """Groups of some of the ranks."""

    torch_distributed_backend: str
    use_device_communicator: bool
    settings: CoordinatorSettings
    _process_group: dist.ProcessGroup | None = None

    def split_group(
        self,
        split_ranks: Sequence[Sequence[int]] | None = None,
        *,
        color: int | None = None,
        key: int = 0,
        group_name: str | None = None,
    ) -> GroupCoordinator | None:
        """Create groups of this group's ranks, by lists or by color. Collective over all of this group's ranks.

        Args:
            split_ranks: For each new group its ranks in this group, in the order that they have in the new one; no
                rank stands in two, and those that stand in none get None. Equal on all ranks.
            color: Instead of lists: ranks of the same color make a group; -1 stands for none.
            key: With a color: where this rank stands in its group; ranks of equal keys in the order of this group.
            group_name: Such as "eval"; by default "split". This group's own name stands before it.

        Returns:
            The new group, which the caller destroys; or None.

        Raises:
            UsageError: A rank stands twice, or is none of this group, or both or neither of the forms are given.
            DisagreementError: The ranks of this group ask for different groups.
            CommTimeoutError: Ranks did not come; `.missing` names them.
        """
        self._keep_order("split_group")
        self._health.check_usable("split_group")
        if (split_ranks is None) == (color is None):
            raise UsageError("split_group takes either split_ranks or color")
        if split_ranks is None:
            lists = self._by_color(color, key)
        else:
            lists = [
                [checks.check_rank(rank, self.world_size, "split_ranks") for rank in ranks]
                for ranks in split_ranks
            ]
        flat = [rank for ranks in lists for rank in ranks]
        if len(set(flat)) != len(flat) or not all(lists):
            raise UsageError(
                f"split_ranks must be lists that share no rank, none of them empty, not {split_ranks}"
            )
        group_ranks = [[self.ranks[rank] for rank in ranks] for ranks in lists]
        group = self._part(group_ranks, group_name or "split")
        if self.rank_in_group in flat:
            return group
        group.destroy()
        return None

    def create_subgroup(
        self, ranks: Sequence[int], *, group_name: str | None = None
    ) -> GroupCoordinator | None:
        """Create a group of some of this group's ranks. Collective: every rank of this group calls it alike.

        Blocks until all have come, for at most the settings' `create_timeout_s`. The new group has the settings and the
        backend of this one, lives by itself, and is destroyed by whoever asked for it. This group stays usable after
        every error.

        Args:
            ranks: Ranks in this group, each once, in the order of the new group.
            group_name: Such as "eval"; by default "sub". This group's own name stands before it.

        Returns:
            The group; None on the ranks that are not in it.

        Raises:
            UsageError: `ranks` is empty, or holds what is no rank of this group or one twice; before anything is sent.
            DisagreementError: The ranks of this group ask for different ranks.
            CommTimeoutError: Ranks did not come; `.missing` names them.
        """
        self._keep_order("create_subgroup")
        self._health.check_usable("create_subgroup")
        chosen = [self.ranks[rank] for rank in self._check_members(ranks)]
        group = self._part([chosen], group_name or "sub")
        if self.rank in chosen:
            return group
        group.destroy()
        return None

    def _check_members(self, ranks: Sequence[int]) -> list[int]:
        where = self._health.where("create_subgroup")
        if not isinstance(ranks, Sequence) or isinstance(ranks, (str, bytes)) or not ranks:
            raise UsageError(f"{where}: ranks must be ranks of this group, at least one, not {ranks!r}")
        for index, rank in enumerate(ranks):
            checks.check_rank(rank, self.world_size, f"ranks[{index}]")
        if len(set(ranks)) != len(ranks):
            raise UsageError(f"{where}: ranks holds a rank twice: {list(ranks)}")
        return list(ranks)

    def _by_color(self, color: int | None, key: int) -> list[list[int]]:
        for value, name in ((color, "color"), (key, "key")):
            if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < 1 << 31:
                raise UsageError(f"{name} must be an integer from -1 to 2**31 - 1, not {value!r}")
        # Both in one integer of 64 bits, which is one meeting.
        stated = self._host.all_gather_integers((color or 0) * (1 << 32) + key)
        members: dict[int, list[tuple[int, int]]] = {}
        for rank, packed in enumerate(stated):
            # A key of -1 borrows from the color.
            of_rank, place = (packed + 1) >> 32, ((packed + 1) & 0xFFFFFFFF) - 1
            if of_rank >= 0:
                members.setdefault(of_rank, []).append((place, rank))
        return [[rank for _, rank in sorted(members[each])] for each in sorted(members)]

    def _part(self, group_ranks: list[list[int]], name: str) -> GroupCoordinator:
        """Create groups of global ranks of this group, all of whose ranks take part. Collective."""
        # Each other rank has one of itself, so that all of this group's ranks agree on who is in the new ones.
        taken = {rank for ranks in group_ranks for rank in ranks}
        others = [[rank] for rank in self.ranks if rank not in taken]
        # Groups beside this one have its name too, and all of them meet in one store: the first rank tells them apart.
        scope = f"{self.unique_name.replace(':', '.')}@{self.ranks[0]}"
        return self._new_group([*group_ranks, *others], f"{scope}/{name}")

    def _new_group(self, group_ranks: list[list[int]], name: str) -> GroupCoordinator:
        from coordinator.group import GroupCoordinator

        return GroupCoordinator(
            group_ranks,
            self.local_rank,
            self.torch_distributed_backend,
            self.use_device_communicator,
            group_name=name,
            settings=self.settings,
        )

    def as_process_group(self) -> dist.ProcessGroup:
        """Return this group as a process group, for torch functions: `dist.all_reduce(t, group=...)` goes our way.

        Not collective. The same one each time; it ends with the group. What torch then calls is what this group's
        methods do: the same order, bits, deadlines and errors. Ranks in torch's functions are global ones.
        """
        self._health.check_usable("as_process_group")
        if self._process_group is None:
            from coordinator.torch_group import register

            self._process_group = register(self)  # type: ignore[arg-type]
        return self._process_group
