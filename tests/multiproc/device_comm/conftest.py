"""The kernels and the processes of the tests of our own CUDA collectives."""

from collections.abc import Iterator

import pytest

from tests.harness import RankPool
from tests.native.cuda.host_build import build_host_library


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Compile kernels for 2 ranks of every dtype and for 3 ranks of bfloat16, once for all tests."""
    directory = tmp_path_factory.mktemp("kernels")
    for dtype in ("bfloat16", "float16", "float32"):
        build_host_library(2, dtype, directory)
    build_host_library(3, "bfloat16", directory)
    return str(directory)


@pytest.fixture(scope="module")
def ranks3() -> Iterator[RankPool]:
    """Start three processes that run one function after another."""
    with RankPool(3) as pool:
        yield pool
