"""The combinations of the compile matrix that `make test` leaves out. `make test-kernels` runs them."""

import pytest

from tests.native.cuda.test_kernel_build import ALL, LATIN, check_no_local_memory


@pytest.mark.parametrize(("arch", "world_size", "dtype"), [each for each in ALL if each not in LATIN])
def test_no_spill_and_no_stack(arch: int, world_size: int, dtype: str) -> None:
    """The registers hold all values of a kernel."""
    check_no_local_memory(arch, world_size, dtype)
