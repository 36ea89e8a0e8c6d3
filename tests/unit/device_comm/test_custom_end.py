"""The end of one rank's resources for our own kernels: what is stopped, and in which order all is freed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import cast

import pytest

from device_comm.cuda.custom.all_reduce import CustomAllReduce
from device_comm.cuda.custom.peer_messages import PeerExchange
from device_comm.cuda.custom.resources import CustomContext
from device_comm.cuda.kernels import FAMILIES
from device_comm.cuda.policy.decision import GroupFacts
from device_comm.cuda_settings import CudaSettings
from device_comm.health import GroupHealth, StatusStore
from shm_broadcast.liveness import PeerWatch
from tests.channels import QuietStore, QuietWatch
from tests.fake_cuda import FakeDriver, violations
from tests.unit.shm_broadcast.test_signal_handlers import AlarmError
from tests.waiting import wait_until

NAME = "custom-end"


class Noted(FakeDriver):
    """A driver that notes what is made and freed, and whether kernels were told to leave before the wait for them."""

    def __init__(self, directory: Path) -> None:
        super().__init__(
            directory, 0, kernels=dict.fromkeys(name for each in FAMILIES.values() for name in each)
        )
        self.made: list[int] = []
        self.freed: list[int] = []
        self.custom: CustomAllReduce | None = None
        self.told: list[bool] = []

    def mem_alloc(self, nbytes: int) -> int:
        self.made.append(super().mem_alloc(nbytes))
        return self.made[-1]

    def mem_free(self, address: int) -> None:
        super().mem_free(address)
        self.freed.append(address)

    def host_alloc_mapped(self, nbytes: int) -> tuple[int, int]:
        found = super().host_alloc_mapped(nbytes)
        self.made.append(found[0])
        return found

    def host_free(self, host_address: int) -> None:
        super().host_free(host_address)
        self.freed.append(host_address)

    def module_load(self, cubin: bytes) -> int:
        self.made.append(super().module_load(cubin))
        return self.made[-1]

    def module_unload(self, module: int) -> None:
        super().module_unload(module)
        self.freed.append(module)

    def context_synchronize(self) -> None:
        if self.custom is not None:
            self.told.append(not self.custom._record.is_clear)
        super().context_synchronize()


def made(driver: Noted) -> CustomAllReduce:
    """Return the collectives of rank 0 of two. All that it hears is what it says itself."""
    watch, store = cast("PeerWatch", QuietWatch()), cast("StatusStore", QuietStore())
    driver.custom = CustomAllReduce.create(
        CustomContext(
            driver=driver,
            health=GroupHealth(NAME, 0, (0, 1), watch, store),
            peers=PeerExchange(lambda own: [own, own], 0, (0, 1)),
            facts=GroupFacts(
                world_size=2,
                device_name="Fake H100",
                arch="sm_90",
                multiprocessors=4,
                has_nvlink=True,
                is_exportable=True,
                is_deterministic=False,
            ),
            settings=CudaSettings(arena_bytes=1 << 16, staging_bytes=1 << 15),
            timeout_s=10.0,
            cubin=lambda _family, _dtype: b"",
        )
    )
    return driver.custom


def watches() -> list[threading.Thread]:
    """Return the threads that watch for kernels that have failed."""
    return [each for each in threading.enumerate() if each.name == f"{NAME} kernels"]


def test_what_was_made_last_is_freed_first(tmp_path: Path) -> None:
    """Modules go before the state and the record, which their kernels' arguments name. The workspaces go first."""
    driver = Noted(tmp_path)
    custom = made(driver)
    # The module is loaded last, but what loads it was made before the table of captured inputs.
    workspace, record, state, table, module = driver.made
    custom.destroy(lambda: None)
    assert driver.freed == [workspace, table, module, state, record]
    assert driver.leaks() == []
    assert violations(tmp_path) == []


@pytest.mark.guarantee("D75")
def test_the_end_behind_a_stop_that_a_handler_interrupts_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are told to leave before the device is waited for, and the thread that reads their record ends."""
    driver = Noted(tmp_path)
    custom = made(driver)

    def strike(_timeout_s: float) -> None:
        raise AlarmError("struck")

    with monkeypatch.context() as patch:
        patch.setattr(custom, "_flush", strike)
        with pytest.raises(AlarmError):
            custom.stop()
    assert len(watches()) == 1
    driver.told.clear()
    custom.destroy(lambda: None)
    assert driver.told == [True]
    wait_until(lambda: not watches(), "the end of the thread", 10.0)
    assert driver.leaks() == []
