"""SGLang's own calls run on our groups: those found in its source, and those that its own functions make.

`make test-engines` runs this. SGLang's wheel is read, and its distributed layer imported; no model is.
"""

import socket
from pathlib import Path

import pytest

from tests.real_engines import sglang_left_out, sglang_processes, sglang_sites, sglang_table

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "sglang-call-sites.md"


def test_every_call_site_that_needs_no_gpu_runs(sglang: Path) -> None:
    """Each call in SGLang's source gives the right result on our group, and the table in docs says so."""
    scan = sglang_sites.scan(sglang)
    assert sglang_left_out.unknown(scan.left_out) == []
    found = sglang_table.results(sglang, scan.sites)
    assert len(found) > 300
    assert [each for each in found if each.failure] == []
    assert sum(not each.cause for each in found) >= 0.9 * len(found)
    version = sglang_sites.version_of(sglang)
    assert sglang_table.table(version, found, scan.left_out) == TABLE.read_text().rstrip("\n")


def test_every_attribute_that_is_read_exists(sglang: Path) -> None:
    """What SGLang reads of `get_parallel().tp_group` and the like is there."""
    found = sglang_sites.attributes(sglang)
    assert {"rank_in_group", "cpu_group", "ca_comm", "active_ranks"} <= found
    assert found <= sglang_table.our_attributes()


def test_its_own_functions_create_our_groups(sglang: Path) -> None:
    """With the plugin, SGLang's `initialize_model_parallel` and `communication_op` work on our groups."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = f"tcp://127.0.0.1:{held.getsockname()[1]}"
    answers = sglang_processes.run_both("tests.real_engines.sglang_run", sglang, address)
    mine = [
        [[float(row * 4 + column + rank) for column in range(4)] for row in range(2)] for rank in range(2)
    ]
    total = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(*mine, strict=True)]
    for rank, found in enumerate(answers):
        assert found["class"] == "SglangGroupCoordinator"
        assert found["ranks"] == [0, 1]
        assert found["same node"] == [True, True]
        for name in ("all_reduce", "attention", "experts", "patched"):
            assert found[name] == total
        assert found["all_gather"] == [a + b for a, b in zip(*mine, strict=True)]
        assert found["into"] == mine[0] + mine[1]
        assert found["scattered"] == [total[rank]]
        assert found["dict"] == mine[0]
        assert found["custom"] == [2.0]
