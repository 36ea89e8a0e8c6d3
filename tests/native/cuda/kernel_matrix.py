"""The combinations of the compile matrix that `make test` leaves out. `make test-kernels` runs them."""

import itertools

import pytest

from device_comm.cuda import kernels
from device_comm.cuda.kernels import DTYPES
from tests.native.cuda.test_kernel_build import LATIN, WORLDS, check_no_local_memory

NEWEST = 121


def known_archs() -> list[int]:
    """Return the architectures that the installed NVRTC knows, from the oldest one that we support."""
    known: list[int] = list(kernels._call("nvrtcGetSupportedArchs"))
    return [arch for arch in known if kernels.OLDEST_ARCH <= arch <= NEWEST]


ALL = list(itertools.product(known_archs(), WORLDS, DTYPES))


@pytest.mark.parametrize(("arch", "world_size", "dtype"), [each for each in ALL if each not in LATIN])
def test_no_spill_and_no_stack(arch: int, world_size: int, dtype: str) -> None:
    """The registers hold all values of a kernel."""
    check_no_local_memory(arch, world_size, dtype)
