"""Go on with other members: rebuild the groups on the ranks that are left, and plan who leaves and who joins."""

from coordinator.elastic.layouts import LayoutRule, Placement, drop_replicas
from coordinator.elastic.part import Change
from coordinator.elastic.rebuilding import Plan, PlanStatus

__all__ = ["Change", "LayoutRule", "Placement", "Plan", "PlanStatus", "drop_replicas"]
