"""Encode and decode ZoneInfo by its key. Imported only when an object or a message holds one.

Importing `zoneinfo` reads the environment (PYTHONTZPATH) to find the system's time zones.
"""

from typing import Final
from zoneinfo import ZoneInfo

from shm_broadcast.codec.adapters import expect
from shm_broadcast.codec.wire_format import Builder, Code, DataBuilder, Describer, Description, Refusal
from shm_broadcast.errors import DecodeError

__all__ = ["BUILDERS", "DATA_BUILDERS", "DESCRIBERS"]

_LONGEST_KEY = 128


def _describe_zone_info(obj: ZoneInfo) -> Description:
    if obj.key is None:
        raise Refusal("it has no key by which the receiver could find it")
    return Code.ZONE_INFO, None, obj.key


def _build_zone_info(_meta: object, body: object) -> ZoneInfo:
    key = expect(str, body, "a ZoneInfo")
    if len(key) > _LONGEST_KEY or not key.isascii() or key.startswith("/") or ".." in key:
        raise DecodeError("not a valid key of a time zone")
    return ZoneInfo(key)


DESCRIBERS: Final[dict[type, Describer]] = {ZoneInfo: _describe_zone_info}
BUILDERS: Final[dict[int, Builder]] = {Code.ZONE_INFO: _build_zone_info}
DATA_BUILDERS: Final[dict[int, DataBuilder]] = {}
