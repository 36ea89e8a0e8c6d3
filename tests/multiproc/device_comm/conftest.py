"""The kernels and the processes of the tests of our own CUDA collectives."""

from collections.abc import Iterator

import pytest

from tests.harness import RankPool
from tests.native.cuda.host_build import build_host_library, shared_folder
from tests.native.nccl_stub.build import build_stub


@pytest.fixture
def libraries(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with kernels of every dtype for the ranks of the test, compiled once for all processes."""
    folder = shared_folder(tmp_path_factory)
    world_size = 3 if "ranks3" in request.fixturenames else 2
    for dtype in ("bfloat16", "float16", "float32"):
        build_host_library(world_size, dtype, folder)
    return str(folder)


@pytest.fixture(scope="session")
def ranks3() -> Iterator[RankPool]:
    """Start three processes that run one function after another."""
    with RankPool(3, brief=True) as pool:
        yield pool


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with the stub of NCCL and the kernels for two ranks."""
    folder = tmp_path_factory.mktemp("cuda")
    build_stub(folder)
    for dtype in ("float32", "float16", "bfloat16"):
        library = build_host_library(2, dtype, shared_folder(tmp_path_factory))
        (folder / library.name).symlink_to(library)
    return str(folder)
