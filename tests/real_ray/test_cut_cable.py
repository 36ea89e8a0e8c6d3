"""A node of a real Ray vanishes without closing a connection: its cable is cut while ranks wait for it."""

import pytest

from tests.probes import requires
from tests.real_ray.cluster import two_hosts

pytestmark = [pytest.mark.engine, requires("ray"), requires("network_namespaces")]

# Ray gives up a node that does not answer for as long as this says; by default it takes a minute.
HEALTH = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


@pytest.mark.guarantee("M8")
def test_ranks_of_a_node_that_vanishes_are_named() -> None:
    """The ranks of the other node name both, long before their deadline of two minutes, and so does the driver."""
    # A cluster of its own, since it is broken afterwards. This module's name sorts before the one with the shared one,
    # and that one is made by its first test: there is one cluster at a time.
    with two_hosts(environ=HEALTH) as cluster:
        found = cluster.run("tests.real_ray.driver", "cut", cluster.second)
    assert found["watch"]["peers"] == [2, 3]
    assert found["watch_after_s"] < 60
    for told in found["ranks"]:
        assert told["kind"] == "PeerLostError"
        assert told["peers"] == [2, 3]
        assert "on host ray-b, " in told["text"]
