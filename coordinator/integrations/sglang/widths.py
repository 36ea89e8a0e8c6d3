"""Compute the rank lists of SGLang's groups from their widths, equally on every rank.

A pipeline stage has `tp` neighbouring ranks. Attention and experts divide the same ranks in two ways, of which the last
factor varies fastest:

    tp = attn_dp x attn_cp x attn_tp = moe_dp x moe_ep x moe_tp
"""

from __future__ import annotations

import dataclasses
import math

from shm_broadcast.errors import UsageError

__all__ = ["Widths"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Widths:
    """The sizes of all dimensions.

    Attributes:
        world: All ranks.
        tp: Ranks of a pipeline stage.
        pp: Stages.
        attn_dp: Copies of the attention layers in a stage.
        attn_cp: Ranks that share a sequence in attention.
        moe_ep: Ranks over which the experts are spread.
        moe_dp: Copies of the experts in a stage.
        dcp: Ranks that share the cache of a sequence while it is decoded.
        shared_experts_tp: Ranks that split the shared experts.

    Raises:
        UsageError: A size is not positive, or the sizes do not divide each other.
    """

    world: int
    tp: int
    pp: int
    attn_dp: int
    attn_cp: int
    moe_ep: int
    moe_dp: int
    dcp: int
    shared_experts_tp: int

    def __post_init__(self) -> None:
        """Check the sizes."""
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise UsageError(f"the size of {field.name} must be a positive integer, not {size!r}")
        if self.world != self.tp * self.pp:
            raise UsageError(f"tp={self.tp} x pp={self.pp} must be the world's {self.world} ranks")
        factors = {
            "attn_dp x attn_cp": self.attn_dp * self.attn_cp,
            "moe_dp x moe_ep": self.moe_dp * self.moe_ep,
            "dcp": self.dcp,
        }
        for name, size in factors.items():
            if self.tp % size:
                raise UsageError(f"{name} = {size} does not divide tp={self.tp}")
        if self.attn_tp % self.shared_experts_tp:
            raise UsageError(
                f"shared_experts_tp={self.shared_experts_tp} does not divide attn_tp={self.attn_tp}"
            )

    @property
    def attn_tp(self) -> int:
        """Ranks that split an attention layer."""
        return self.tp // (self.attn_dp * self.attn_cp)

    @property
    def moe_tp(self) -> int:
        """Ranks that split an expert."""
        return self.tp // (self.moe_dp * self.moe_ep)

    def aliases(self) -> dict[str, str]:
        """Return the dimensions that have no group of their own, with the one whose group they use."""
        same = {
            name: "tp"
            for name, size in (
                ("attn_cp", self.attn_cp),
                ("attn_tp", self.attn_tp),
                ("moe_dp", self.moe_dp),
                ("moe_ep", self.moe_ep),
                ("moe_tp", self.moe_tp),
            )
            if size == self.tp
        }
        if self.attn_cp > self.moe_dp:
            # Ranks that share a sequence share its tokens before the experts, whose copies are fewer.
            same["moe_dp"] = same.get("attn_cp", "attn_cp")
        if self.shared_experts_tp > 1 and self.shared_experts_tp == self.attn_tp:
            same["shared_experts_tp"] = same.get("attn_tp", "attn_tp")
        return same

    def tables(self) -> dict[str, list[list[int]]]:
        """Return the rank lists of every dimension with a group of its own, in the order of creation."""
        attention = (self.attn_dp, self.attn_cp, self.attn_tp)
        experts = (self.moe_dp, self.moe_ep, self.moe_tp)
        tables = {"tp": self._along((self.tp,), 0)}
        if self.dcp > 1:
            tables["dcp"] = self._along((self.dcp,), 0)
        tables["attn_cp"] = self._along(attention, 1)
        tables["attn_tp"] = self._along(attention, 2)
        if self.shared_experts_tp > 1:
            tables["shared_experts_tp"] = self._along((self.shared_experts_tp,), 0)
        tables["moe_dp"] = self._along(experts, 0)
        tables["moe_ep"] = self._along(experts, 1)
        tables["moe_tp"] = self._along(experts, 2)
        tables["pp"] = self._along((self.pp, self.tp), 0)
        tables["self_pp"] = [[rank] for rank in range(self.world)]
        return {name: table for name, table in tables.items() if name not in self.aliases()}

    def _along(self, sizes: tuple[int, ...], axis: int) -> list[list[int]]:
        """Return the lists of ranks that differ in one axis of a grid of these sizes, repeated over the world."""
        size, step = sizes[axis], math.prod(sizes[axis + 1 :])
        starts = [rank for rank in range(self.world) if rank // step % size == 0]
        return [[start + each * step for each in range(size)] for start in starts]
