"""How often the leaders of hosts swap in an all-reduce: a function of sizes alone, so that all choose alike."""

import pytest
import torch

from device_comm.cpu.hierarchical import takes_one_swap


@pytest.mark.guarantee("D16")
@pytest.mark.parametrize(("hosts", "nbytes"), [(3, 93_748), (4, 41_664), (8, 11_904), (16, 4_760)])
def test_more_hosts_share_smaller_results(hosts: int, nbytes: int) -> None:
    """One swap sends to every host; what another one saves of 62,500 bytes and more is worth its round trip."""
    for more, is_one in ((0, True), (8, False)):
        partial = torch.empty((nbytes + more) // 4)
        assert takes_one_swap(hosts, partial, torch.float32) is is_one
        assert takes_one_swap(hosts, partial, torch.bfloat16) is is_one


@pytest.mark.guarantee("D16")
@pytest.mark.parametrize(
    ("dtype", "nbytes", "is_one"),
    [
        (torch.float32, 64 << 20, True),
        (torch.bfloat16, 256 << 10, True),
        (torch.bfloat16, (256 << 10) + 4, False),
        (torch.float8_e4m3fn, 1 << 20, False),
    ],
)
def test_two_hosts_share_what_is_wider_than_its_result(dtype: torch.dtype, nbytes: int, is_one: bool) -> None:
    """Of equal widths, two swaps would send as many bytes as one."""
    assert takes_one_swap(2, torch.empty(nbytes // 4), dtype) is is_one
