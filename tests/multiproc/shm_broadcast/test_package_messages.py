"""Objects of a registered package between processes, of which one may not have imported their module."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator import CarriedError, DecodeError, register_package
from shm_broadcast.codec import unregister_package
from tests.engines import refusal
from tests.harness import RankPool
from tests.unit.shm_broadcast import engine_samples
from tests.unit.shm_broadcast.codec_samples import same
from tests.worlds import world

SOURCE = """
import msgspec

class Params(msgspec.Struct):
    seed: int
    derived: int = 0

    def __post_init__(self):
        self.derived += 1
"""


@contextmanager
def allowed(package: str, directory: Path) -> Iterator[None]:
    """Allow a package whose module lies in `directory`, and forget it afterwards."""
    register_package(package)
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        sys.path.remove(str(directory))
        sys.modules.pop(package, None)
        unregister_package(package)


def half_imported(rank: int, world_size: int, directory: Path) -> str:
    with world(rank, world_size, directory) as group:
        if rank == 0:
            (directory / "engine_model.py").write_text(SOURCE)
        group.barrier()
        with allowed("engine_model", directory):
            if rank == 0:
                params = importlib.import_module("engine_model").Params(5)
                for _ in range(3):
                    group.broadcast_object([params], src=0)
                return ""
            text = refusal(lambda: group.broadcast_object(src=0), DecodeError)
            assert "engine_model" not in sys.modules
            importlib.import_module("engine_model")
            for _ in range(2):
                arrived = group.broadcast_object(src=0)[0]
                assert (arrived.seed, arrived.derived) == (5, 1)
            return text


@pytest.mark.guarantee("C16")
def test_a_receiver_that_has_not_imported_the_module_says_so_and_goes_on(ranks2: RankPool) -> None:
    """The error names the module; nothing is imported; once it is imported, the next message arrives."""
    _, text = ranks2.run(half_imported)
    assert "has not imported engine_model; import it" in text


def carried(rank: int, world_size: int, directory: Path) -> None:
    package = engine_samples.__name__
    objects = engine_samples.all_carried()
    with world(rank, world_size, directory) as group:
        register_package(package)
        try:
            for obj in objects:
                for _ in range(2):
                    assert same(group.broadcast_object(obj if rank == 0 else None, src=0), obj)
            failed: Any = group.all_gather_object(engine_samples.OwnError(f"rank {rank}"))
        finally:
            unregister_package(package)
    kinds = [type(error) for error in failed]
    assert kinds.count(CarriedError) >= world_size - 1
    assert [str(error).endswith(f"rank {number}") for number, error in enumerate(failed)] == [
        True
    ] * world_size


@pytest.mark.guarantee("C15")
def test_objects_of_a_package_arrive_in_another_process(ranks2: RankPool) -> None:
    """Each kind of class arrives equal, through a queue and a gather, where both sides have allowed the package."""
    ranks2.run(carried)
