"""Which devices CUDA_VISIBLE_DEVICES leaves to a process: ordinals, UUIDs and MIG instances, as CUDA documents them.

Pure functions of the text and of what is plugged in. CUDA itself hides what it does not understand without a word: a
typing error in the second entry leaves one device of eight. Here the same list comes out, with the reason why it ended.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from shm_broadcast.errors import SettingsError

__all__ = [
    "MigInstance",
    "PhysicalDevice",
    "VisibleDevice",
    "VisibleDevices",
    "plugged_in",
    "select_device",
    "visible_devices",
]

# "MIG-GPU-<uuid>/<GPU instance>/<compute instance>", which drivers before R470 used.
_OLD_MIG: Final = re.compile(r"MIG-(GPU-[0-9a-f-]+)/(\d+)/(\d+)", re.IGNORECASE)
_ORDINAL: Final = re.compile(r"[+-]?\d+")


class MigInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a device that is used like one.

    Attributes:
        uuid: "MIG-..." as nvidia-smi -L writes it.
        gpu_instance: Its number in the device.
        compute_instance: Its number in that.
    """

    uuid: str
    gpu_instance: int
    compute_instance: int


class PhysicalDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device that is plugged in.

    Attributes:
        ordinal: Its number, in the order that CUDA_DEVICE_ORDER asks for.
        uuid: "GPU-..." as nvidia-smi -L writes it.
        is_mig: Whether it is cut into instances.
        instances: These, in their order.
    """

    ordinal: int
    uuid: str
    is_mig: bool = False
    instances: tuple[MigInstance, ...] = ()


class VisibleDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a process sees under one ordinal.

    Attributes:
        physical: The device.
        instance: The part of it, or None for the whole.
    """

    physical: PhysicalDevice
    instance: MigInstance | None = None

    @property
    def uuid(self) -> str:
        """Return the UUID of what is seen."""
        return self.physical.uuid if self.instance is None else self.instance.uuid


class VisibleDevices(msgspec.Struct, frozen=True):
    """What a process sees, by ordinal.

    Attributes:
        devices: The devices.
        ended: Why the list ends before the text does; empty if it does not.
    """

    devices: tuple[VisibleDevice, ...]
    ended: str = ""


def visible_devices(text: str | None, inventory: Sequence[PhysicalDevice]) -> VisibleDevices:
    """Return what a process with CUDA_VISIBLE_DEVICES=`text` sees.

    * No variable: everything. An empty text, or one of blanks: nothing.
    * Entries are ordinals or UUIDs with their prefix, of which enough digits to be unique suffice.
    * A negative number ends the list; so does the first entry that is not valid.
    * An entry that comes twice leaves nothing at all. (Observed by others, not documented by CUDA.)
    * Of MIG instances a process sees one (behind a whole device, CUDA does not document what happens: here
      the list ends before it): the first, by its UUID, by `MIG-GPU-<uuid>/<gi>/<ci>`, or as
      the first of a device that is named and cut into instances.

    Args:
        text: The variable's value, or None if it is not set.
        inventory: What is plugged in.
    """
    if text is None:
        return _only_one_instance([_first_part(device) for device in inventory], "")
    found: list[VisibleDevice] = []
    entries = [entry.strip() for entry in text.split(",")]
    for entry in entries if text.strip() else ():
        device, why = _find(entry, inventory)
        if device is None:
            return _only_one_instance(found, why)
        if any(device.uuid == earlier.uuid for earlier in found):
            return VisibleDevices((), f"{entry!r} names a device that came before: then CUDA shows none")
        found.append(device)
    return _only_one_instance(found, "")


def plugged_in(folder: Path = Path("/proc/driver/nvidia/gpus")) -> list[PhysicalDevice]:
    """Return the devices that NVIDIA's kernel driver lists, in the order of their bus; none where there is no driver.

    CUDA numbers them so with CUDA_DEVICE_ORDER=PCI_BUS_ID; without it the fastest comes first, which makes a difference
    only where they are not alike. MIG instances are not listed there.
    """
    try:
        buses = sorted(folder.iterdir())
    except OSError:
        return []
    found: list[PhysicalDevice] = []
    for bus in buses:
        try:
            lines = (bus / "information").read_text().splitlines()
        except OSError:
            continue
        facts = dict(line.split(":", 1) for line in lines if ":" in line)
        uuid = facts.get("GPU UUID", "").strip()
        if uuid.startswith("GPU-"):
            found.append(PhysicalDevice(ordinal=len(found), uuid=uuid))
    return found


def select_device(text: str | None, inventory: Sequence[PhysicalDevice], ordinal: int) -> VisibleDevice:
    """Return the device that a process with CUDA_VISIBLE_DEVICES=`text` calls `ordinal`.

    Raises:
        SettingsError: There is none; the text says what CUDA shows and which entry ended the list.
    """
    visible = visible_devices(text, inventory)
    if 0 <= ordinal < len(visible.devices):
        return visible.devices[ordinal]
    shown = "is not set" if text is None else f"is {text!r}"
    why = f": {visible.ended}" if visible.ended else ""
    raise SettingsError(
        f"there is no device {ordinal}: CUDA_VISIBLE_DEVICES {shown}, which shows {len(visible.devices)} of "
        f"{len(inventory)} devices{why}"
    )


def _first_part(device: PhysicalDevice) -> VisibleDevice:
    return VisibleDevice(device, device.instances[0] if device.instances else None)


def _only_one_instance(found: Sequence[VisibleDevice], ended: str) -> VisibleDevices:
    """Cut the list at the first MIG instance: CUDA uses one, and nothing beside it."""
    usable = [device for device in found if device.instance is not None or not device.physical.is_mig]
    for position, device in enumerate(usable):
        if device.instance is not None:
            first = position == 0
            kept = usable[:1] if first else usable[:position]
            why = f"{device.uuid} is a MIG instance, of which a process sees one and nothing else"
            return VisibleDevices(tuple(kept), ended if first and len(found) == 1 else why)
    if len(usable) < len(found):
        ended = ended or "a device in MIG mode without an instance cannot be used"
    return VisibleDevices(tuple(usable), ended)


def _find(entry: str, inventory: Sequence[PhysicalDevice]) -> tuple[VisibleDevice | None, str]:
    """Return what an entry names, or (None, why it ends the list)."""
    if _ORDINAL.fullmatch(entry):
        ordinal = int(entry)
        if ordinal < 0:
            return None, f"{entry} ends the list"
        devices = [device for device in inventory if device.ordinal == ordinal]
        return (_first_part(devices[0]), "") if devices else (None, f"there is no device {ordinal}")
    old = _OLD_MIG.fullmatch(entry)
    if old:
        parts = [
            VisibleDevice(device, part)
            for device in _starting_with(old[1], inventory)
            for part in device.instances
            if (part.gpu_instance, part.compute_instance) == (int(old[2]), int(old[3]))
        ]
    elif entry.upper().startswith("MIG-"):
        parts = [
            VisibleDevice(device, part)
            for device in inventory
            for part in device.instances
            if part.uuid.lower().startswith(entry.lower())
        ]
    elif entry.upper().startswith("GPU-"):
        parts = [_first_part(device) for device in _starting_with(entry, inventory)]
    else:
        return None, f"{entry!r} is neither a number nor a UUID that begins with GPU- or MIG-"
    if len(parts) == 1:
        return parts[0], ""
    return None, f"{entry!r} names {len(parts)} devices" if parts else f"there is no device {entry!r}"


def _starting_with(prefix: str, inventory: Sequence[PhysicalDevice]) -> list[PhysicalDevice]:
    return [device for device in inventory if device.uuid.lower().startswith(prefix.lower())]
