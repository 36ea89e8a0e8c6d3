"""The communicator of a device is one that was registered, one that a package declares, or the general one."""

import functools
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from device_comm import registry
from device_comm.base import CommunicatorContext, DeviceCommunicator
from device_comm.cpu.connect import connect_cpu
from device_comm.process_group import ProcessGroupCommunicator
from device_comm.registry import (
    ENTRY_POINTS,
    communicator_factory,
    communicator_name,
    register_communicator,
    unregister_communicator,
)
from device_comm.solo import SoloCommunicator
from shm_broadcast.errors import CapabilityError, UsageError


class Mine(SoloCommunicator):
    """A third party's communicator."""


class Other(SoloCommunicator):
    """Another third party's communicator."""


def build(context: CommunicatorContext, **options: Any) -> DeviceCommunicator:
    """A factory that is a function, not a class."""
    return Mine(context)


@pytest.fixture(autouse=True)
def nothing_registered() -> Iterator[None]:
    yield
    for device_type in ("cpu", "xpu"):
        unregister_communicator(device_type)


Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install packages that each declare an entry point."""

    def one(package: str, entry_point: str, source: str = "") -> None:
        site = tmp_path / package
        metadata = site / f"{package}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{entry_point}\n")
        (site / f"{package}.py").write_text(source)
        monkeypatch.syspath_prepend(str(site))

    before = set(sys.modules)
    yield one
    for name in set(sys.modules) - before:
        del sys.modules[name]


SOURCE = "from device_comm.solo import SoloCommunicator\nclass Declared(SoloCommunicator): pass\n"


def test_without_more_the_process_group_serves() -> None:
    """By default the general communicator serves, and a group of one uses the solo communicator."""
    assert communicator_factory("xpu", 2) is ProcessGroupCommunicator
    assert communicator_factory("xpu", 1) is SoloCommunicator
    assert communicator_name("xpu", 2) == "device_comm.process_group.ProcessGroupCommunicator"


def test_a_registered_factory_serves_its_type() -> None:
    """A registered factory serves groups of several ranks until it is unregistered."""
    register_communicator("xpu", Mine)
    register_communicator("xpu", Mine)
    assert communicator_factory("xpu", 2) is Mine
    assert communicator_factory("cpu", 2) is connect_cpu
    assert communicator_factory("xpu", 1) is SoloCommunicator
    assert communicator_name("xpu", 2).endswith("test_communicator_registry.Mine")
    with pytest.raises(UsageError, match="a communicator for 'xpu' is registered already: .*Mine"):
        register_communicator("xpu", Other)
    unregister_communicator("xpu")
    unregister_communicator("xpu")
    register_communicator("xpu", Other)
    assert communicator_factory("xpu", 2) is Other


@pytest.mark.parametrize("device_type", ["", "cuda:0", 1, None, "c p u"])
def test_a_device_type_is_checked(device_type: Any) -> None:
    """A device type with an index is refused, because it would never be looked up."""
    with pytest.raises(UsageError, match="device_type must be"):
        register_communicator(device_type, Mine)


def test_a_factory_can_be_called() -> None:
    """A factory must be callable, as it would otherwise fail while a group is created."""
    with pytest.raises(UsageError, match="a factory takes a CommunicatorContext"):
        register_communicator("xpu", "module:Mine")  # type: ignore[arg-type]


def test_any_factory_has_a_name_that_ranks_can_compare() -> None:
    """A factory's name contains no address, which would differ between processes."""
    register_communicator("xpu", functools.partial(functools.partial(build, depth=2), width=3))
    assert communicator_name("xpu", 2).endswith("test_communicator_registry.build")


def test_a_declared_factory_serves_its_type(install: Install) -> None:
    """An installed package's factory serves its device; a registered one takes precedence."""
    install("acme", "xpu = acme:Declared", SOURCE)
    factory = communicator_factory("xpu", 2)
    assert communicator_name("xpu", 2) == "acme.Declared"
    assert isinstance(factory, type)
    assert issubclass(factory, SoloCommunicator)
    assert communicator_factory("cpu", 2) is connect_cpu
    register_communicator("xpu", Mine)
    assert communicator_factory("xpu", 2) is Mine


def test_the_same_declaration_twice_is_one(install: Install) -> None:
    """Equal declarations count once, such as those of an editable install beside a built one."""
    install("acme", "xpu = acme:Declared", SOURCE)
    install("acme_again", "xpu = acme:Declared")
    assert communicator_name("xpu", 2) == "acme.Declared"


def test_two_declarations_are_refused(install: Install) -> None:
    """Different declarations are refused, as their order depends on the host; registering one resolves it."""
    install("acme", "xpu = acme:Declared", SOURCE)
    install("emca", "xpu = emca:Declared", SOURCE)
    with pytest.raises(UsageError, match="acme:Declared .acme.*choose one with register_communicator"):
        communicator_factory("xpu", 2)
    assert communicator_factory("cpu", 2) is connect_cpu
    register_communicator("xpu", Mine)
    assert communicator_factory("xpu", 2) is Mine


@pytest.mark.parametrize(
    ("target", "source", "text"),
    [
        ("broken:Declared", "import nothing_of_that_name", "cannot be loaded: .*nothing_of_that_name"),
        ("broken:Missing", "", "cannot be loaded: .*Missing"),
        ("broken:value", "value = 5", "is no factory"),
    ],
)
def test_a_declaration_that_cannot_be_used_is_named(
    install: Install, target: str, source: str, text: str
) -> None:
    """An unusable declaration raises, because a silent fallback could differ from other ranks."""
    install("broken", f"xpu = {target}", source)
    with pytest.raises(CapabilityError, match=text) as caught:
        communicator_factory("xpu", 2)
    assert caught.value.requirement == target
    assert "(broken)" in str(caught.value)


def test_the_metadata_of_all_packages_is_read_once(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Package metadata is read once, and again only if the path changes."""
    calls = []

    def counted(**arguments: Any) -> Any:
        calls.append(arguments)
        return importlib.metadata.entry_points(**arguments)

    monkeypatch.setattr(registry, "entry_points", counted)
    install("acme", "xpu = acme:Declared", SOURCE)
    for _ in range(10):
        communicator_name("xpu", 2)
        communicator_factory("cpu", 2)
    assert len(calls) == 1
    install("emca", "cpu = emca:Declared", SOURCE)
    assert communicator_name("cpu", 2) == "emca.Declared"
    assert len(calls) == 2
