"""HKDF with SHA-256, as RFC 5869 defines it."""

from __future__ import annotations

import hmac
from typing import Final

__all__ = ["expand", "extract"]

_HASH_BYTES: Final = 32


def extract(salt: bytes, material: bytes) -> bytes:
    """Return a key of 32 bytes that has the entropy of `material`; without a salt, zeros stand for it."""
    return hmac.digest(salt or bytes(_HASH_BYTES), material, "sha256")


def expand(key: bytes, info: bytes, length: int) -> bytes:
    """Return `length` bytes, at most 8160, which belong to `info`; `key` is the result of `extract`."""
    if not 0 < length <= 255 * _HASH_BYTES:
        raise ValueError(f"HKDF gives 1 to {255 * _HASH_BYTES} bytes, not {length}")
    block, blocks = b"", b""
    for number in range(1, -(-length // _HASH_BYTES) + 1):
        block = hmac.digest(key, block + info + bytes([number]), "sha256")
        blocks += block
    return blocks[:length]
