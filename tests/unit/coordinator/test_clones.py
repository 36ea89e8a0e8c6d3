"""Hosts that are clones of one machine take each other's processes for their own that have ended."""

import msgspec
import pytest

from coordinator.bootstrap.blocking_calls import refuse_clones
from shm_broadcast.errors import PeerLostError
from shm_broadcast.liveness import PeerWatch, this_process


@pytest.mark.guarantee("G64")
def test_ranks_that_seem_to_be_here_but_call_their_host_otherwise_are_told_apart() -> None:
    """They are on a clone of this host, or in a container."""
    own = this_process()
    far = msgspec.structs.replace(own, boot_id="0" * 36, hostname="far")
    twin = msgspec.structs.replace(own, pid=2**22 - 1, hostname="twin")
    watch = PeerWatch(own, {1: own, 2: far, 3: twin})
    try:
        assert watch.peers == (1, 2, 3)
        assert watch.lost() == (3,)
        assert watch.twin_hosts([1, 2]) == ()
        assert watch.twin_hosts([1, 2, 3, 7]) == ("twin",)
        with pytest.raises(PeerLostError) as refusal:
            refuse_clones(watch, "here")
    finally:
        watch.close()
    assert refusal.value.peers == (3,)
    for text in (own.hostname, "twin", "one boot id", "GROUP_COORDINATOR_HOST_ID"):
        assert text in str(refusal.value)


def test_a_rank_that_has_ended_here_is_no_clone() -> None:
    """Nothing is raised before whoever waits for it notices."""
    own = this_process()
    watch = PeerWatch(own, {1: msgspec.structs.replace(own, pid=2**22 - 1)})
    try:
        assert watch.lost() == (1,)
        refuse_clones(watch, "here")
    finally:
        watch.close()
