"""Seal a queue's key for the processes of one family, so that a serialised handle never shows it.

A process and the children that `multiprocessing` starts share a secret, the `authkey`: a spawned child receives it over
an inherited pipe before anything else is decoded, a forked child inherits it. A sealed key is encrypted and
authenticated with that secret; only processes of the family can open it.
"""

from __future__ import annotations

import hmac
import secrets
from multiprocessing.process import current_process
from typing import Final

from shm_broadcast.errors import DecodeError
from shm_broadcast.handle import KEY_BYTES

_SALT_BYTES: Final = 16
_TAG_BYTES: Final = 32
SEALED_BYTES: Final = _SALT_BYTES + KEY_BYTES + _TAG_BYTES


def seal(key: bytes, bound_to: bytes) -> bytes:
    """Return the sealed form of `key`, `SEALED_BYTES` long.

    Args:
        key: The key of a queue, 32 bytes.
        bound_to: What the key belongs to, such as the queue's handle: `open_sealed` refuses another one.
    """
    salt = secrets.token_bytes(_SALT_BYTES)
    # The salt is random, so the pad is used once; it has the length of the key.
    body = _combined(key, _pad(salt))
    return salt + body + _tag(salt, body, bound_to)


def open_sealed(sealed: bytes, bound_to: bytes) -> bytes:
    """Return the key that `seal` sealed.

    Raises:
        DecodeError: It was sealed in a process of another family or for something else, or it was changed.
    """
    if type(sealed) is not bytes or len(sealed) != SEALED_BYTES:
        raise DecodeError(f"a sealed key has {SEALED_BYTES} bytes")
    salt, body = sealed[:_SALT_BYTES], sealed[_SALT_BYTES:-_TAG_BYTES]
    if not hmac.compare_digest(sealed[-_TAG_BYTES:], _tag(salt, body, bound_to)):
        raise DecodeError(
            "this queue handle was sealed by another family of processes, or it was changed: a handle can be opened by "
            "the process that made it, its parent, and the children that multiprocessing starts for either"
        )
    return _combined(body, _pad(salt))


def _pad(salt: bytes) -> bytes:
    return hmac.digest(_family_secret(), b"group-coordinator pad" + salt, "sha256")


def _tag(salt: bytes, body: bytes, bound_to: bytes) -> bytes:
    return hmac.digest(_family_secret(), b"group-coordinator tag" + salt + body + bound_to, "sha256")


def _family_secret() -> bytes:
    return bytes(current_process().authkey)


def _combined(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))
