"""What `security="required"` forbids: bytes between hosts that are neither encrypted nor acknowledged."""

from __future__ import annotations

import logging

import torch.distributed as dist

from coordinator.security.store import secured
from coordinator.settings import CoordinatorSettings
from shm_broadcast.errors import UsageError
from shm_broadcast.reports.log_fields import log_fields

__all__ = ["check_plaintext", "has_secret", "warn_if_unused"]

logger: logging.Logger = logging.getLogger(__name__)


def has_secret(settings: CoordinatorSettings) -> bool:
    """Return whether the settings name a place of a secret."""
    return settings.secret_file is not None or settings.secret_descriptor is not None


def warn_if_unused(settings: CoordinatorSettings, store: dist.Store, rank: int) -> None:
    """Log that the secret protects nothing, if a world that was opened by others has another store than ours."""
    if has_secret(settings) and secured(store) is None:
        logger.warning(
            "the settings name a secret, and torch.distributed was initialised before, with a store that is not "
            "encrypted: the secret protects nothing here; let init_distributed_environment open the world",
            extra=log_fields(rank=rank, call="init_distributed_environment"),
        )


def check_plaintext(settings: CoordinatorSettings, store: dist.Store, spans_hosts: bool, what: str) -> None:
    """Raise if the settings require security and `what` would send plaintext between hosts.

    All ranks raise alike: they have agreed on the settings, and on where they are.

    Args:
        settings: The settings of the world or the group.
        store: The store in which its ranks have met.
        spans_hosts: Whether they are on several hosts.
        what: What is being created, for the error.

    Raises:
        UsageError: It would.
    """
    if settings.security != "required" or not spans_hosts:
        return
    if secured(store) is None:
        raise UsageError(
            f'creating {what}: security="required", and its ranks on several hosts have met in a store without '
            "encryption: let init_distributed_environment or create_stateless_group open the world"
        )
    if settings.bulk != "plaintext":
        raise UsageError(
            f'creating {what}: security="required", and tensors and objects of ranks on several hosts go over Gloo, '
            "NCCL or connections of ours, which do not encrypt: keep them inside a network that you trust, and "
            'acknowledge that with bulk="plaintext" (GROUP_COORDINATOR_BULK=plaintext)'
        )
