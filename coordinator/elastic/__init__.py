"""Go on with other members: rebuild the groups on the ranks that are left after a failure."""

from coordinator.elastic.layouts import LayoutRule, Placement, drop_replicas
from coordinator.elastic.rebuilding import Change

__all__ = ["Change", "LayoutRule", "Placement", "drop_replicas"]
