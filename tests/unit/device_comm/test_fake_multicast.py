"""The tests' driver convicts every order of multicast calls that hangs or breaks a real device."""

import ctypes
import faulthandler
import os
import signal
from pathlib import Path

import pytest

from shm_broadcast.errors import CudaError
from tests.fake_cuda import FakeDriver, FakeFaults, fake_devices, violations
from tests.fake_multicast import Window


class Team:
    """Two devices of one process, and a multicast object of which both have a handle."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.drivers = [FakeDriver(directory, rank, devices=fake_devices(2)) for rank in range(2)]
        self.nbytes = self.drivers[0].multicast_granularity(2, 1)
        made = self.drivers[0].multicast_create(2, self.nbytes)
        descriptor = self.drivers[0].vmm_export(made)
        self.handles = [made, self.drivers[1].vmm_import(descriptor)]
        os.close(descriptor)
        self.memory = [driver.vmm_create(self.nbytes) for driver in self.drivers]

    def add(self, *ranks: int) -> None:
        """Add the devices of ranks."""
        for rank in ranks:
            self.drivers[rank].multicast_add_device(self.handles[rank])

    def bind(self, *ranks: int) -> None:
        """Bind the memory of ranks."""
        for rank in ranks:
            self.drivers[rank].multicast_bind(self.handles[rank], self.memory[rank], self.nbytes)

    def map(self, rank: int) -> int:
        """Map the object for a rank; return the multimem address."""
        return self.drivers[rank].vmm_map(self.handles[rank], self.nbytes)

    def unbind(self, *ranks: int) -> None:
        """Unbind the memory of ranks."""
        for rank in ranks:
            self.drivers[rank].multicast_unbind(self.handles[rank], self.nbytes)

    def let_go(self) -> list[str]:
        """Release all handles; return what is left, and forget it."""
        for driver, handle, memory in zip(self.drivers, self.handles, self.memory, strict=True):
            driver.vmm_release(memory)
            driver.vmm_release(handle)
        left = [each for driver in self.drivers for each in driver.leaks()]
        for driver in self.drivers:
            driver.release()
        return left


def test_the_right_order_leaves_nothing(tmp_path: Path) -> None:
    """Add all, bind all, map; unmap all, unbind, release."""
    team = Team(tmp_path)
    team.add(0, 1)
    team.bind(1, 0)
    addresses = [team.map(0), team.map(1)]
    assert len(team.drivers[0].leaks()) == 4
    for driver, address in zip(team.drivers, addresses, strict=True):
        driver.vmm_unmap(address, team.nbytes)
    team.unbind(0, 1)
    assert team.let_go() == []
    assert violations(tmp_path) == []


def test_a_bind_before_all_devices_were_added_is_convicted(tmp_path: Path) -> None:
    """The driver would wait for the other device for ever."""
    team = Team(tmp_path)
    team.add(0)
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        team.bind(0)
    assert "when 1 of 2 devices had been added" in violations(tmp_path)[0]
    with pytest.raises(CudaError, match="added before"):
        team.add(0)
    team.add(1)
    with pytest.raises(CudaError, match="the team is full"):
        team.add(1)
    team.let_go()


def test_a_map_before_all_memory_was_bound_is_convicted(tmp_path: Path) -> None:
    """A kernel could reach an area that is not there yet."""
    team = Team(tmp_path)
    team.add(0, 1)
    team.bind(0)
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        team.map(0)
    assert "when 1 of 2 ranks had bound" in violations(tmp_path)[0]
    team.unbind(0)
    team.let_go()


def test_an_unbind_while_the_object_is_mapped_is_convicted(tmp_path: Path) -> None:
    """A rank unmaps the object first; that others have it mapped does not matter."""
    team = Team(tmp_path)
    team.add(0, 1)
    team.bind(0, 1)
    address = team.map(1)
    team.unbind(0)
    assert violations(tmp_path) == []
    team.unbind(1)
    assert "while it was mapped here" in violations(tmp_path)[0]
    team.drivers[1].vmm_unmap(address, team.nbytes)
    assert len(violations(tmp_path)) == 1
    team.let_go()


def test_memory_that_is_released_while_it_is_bound_is_convicted(tmp_path: Path) -> None:
    """So is a handle of the object. What is still bound counts as left."""
    team = Team(tmp_path)
    team.add(0, 1)
    team.bind(0)
    left = team.let_go()
    assert [each.split(" to ")[0] for each in left] == ["memory bound"]
    found = "\n".join(violations(tmp_path))
    assert "whose memory is bound" in found
    assert "to which memory of this rank is bound" in found


def test_what_cuda_refuses_is_refused(tmp_path: Path) -> None:
    """Sizes that are no multiple, foreign memory, unknown handles, a device without multicast."""
    team = Team(tmp_path)
    one = team.drivers[0]
    team.add(0, 1)
    refused = [
        lambda: one.multicast_create(2, team.nbytes - 1),
        lambda: one.multicast_granularity(0, 1),
        lambda: one.multicast_bind(team.handles[0], 12345, team.nbytes),
        lambda: one.multicast_bind(team.handles[0], team.memory[0], 2 * team.nbytes),
        lambda: one.multicast_unbind(team.handles[0], team.nbytes),
        lambda: one.multicast_add_device(12345),
    ]
    for call in refused:
        with pytest.raises(CudaError, match="INVALID_VALUE"):
            call()
    without = FakeDriver(tmp_path, 2, devices=fake_devices(3), faults=FakeFaults(multicast=False))
    assert not without.multicast_supported()
    with pytest.raises(CudaError, match="NOT_SUPPORTED"):
        without.multicast_create(2, team.nbytes)
    assert violations(tmp_path) == []
    team.let_go()


def test_only_multimem_instructions_may_use_a_multimem_address() -> None:
    """Any other access ends the process, as its result would be undefined."""
    memory = ctypes.create_string_buffer(64)
    window = Window([ctypes.addressof(memory)] * 2, 64)
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        ctypes.string_at(window.address, 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    window.close()
