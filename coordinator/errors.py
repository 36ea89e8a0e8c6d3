"""All error classes of this project; `shm_broadcast.errors` documents each."""

from shm_broadcast.errors import *  # noqa: F403
from shm_broadcast.errors import __all__ as __all__  # noqa: PLC0414 - this exports the names above
