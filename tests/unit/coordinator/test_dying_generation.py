"""A rank of the next run comes to a rendezvous directory while the last process of the run before leaves it."""

import shutil
from pathlib import Path

import pytest

from coordinator.bootstrap.methods.directory import DirectoryRendezvous
from coordinator.errors import CommTimeoutError


def test_a_generation_that_is_being_removed_is_not_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last process has looked for links, and removes the claims, just before a rank of the next run links it."""
    old = [DirectoryRendezvous(tmp_path, rank, 2) for rank in range(2)]
    for each in old:
        each.join(5.0)
    generation = old[0]._generation
    assert generation is not None
    link_store = DirectoryRendezvous._link_store

    def link_late(self: DirectoryRendezvous, found: Path) -> None:
        for each in old:
            each._unlink()
            each._store = None
        old[0]._remove_pointer(generation)
        for path in generation.iterdir():
            if path.name != "store":
                path.unlink()
        link_store(self, found)

    late = DirectoryRendezvous(tmp_path, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(DirectoryRendezvous, "_link_store", link_late)
        with pytest.raises(CommTimeoutError, match="the last generation was removed"):
            late.join(0.0)
    assert not (generation / "rank-1").exists()
    assert late._link is None
    shutil.rmtree(generation)
    for each in old:
        each._generation = None
