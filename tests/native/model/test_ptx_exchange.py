"""What PTX's memory model says of the exchange of expert-parallel rows and of the mailboxes of clusters."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.native.model.ptx_exchange import Exchange, Mailboxes
from tests.native.model.ptx_model import executions

CUDA = Path(__file__).parents[3] / "device_comm" / "csrc" / "cuda"


def hole(protocol: Exchange | Mailboxes, **changes: object) -> str:
    """Return the kind of the first failure that the model admits, or "" if it admits none."""
    return next(replace(protocol, **changes).failures(), "").partition(":")[0]  # type: ignore[arg-type]


def has_executions(protocol: Exchange | Mailboxes) -> bool:
    """Return whether the model admits any execution, without which a missing hole means nothing."""
    return next(executions(protocol.program()), None) is not None


@pytest.mark.parametrize("boundary", ["stream", "both", "fenced"])
def test_an_exchange_brings_the_rows_of_its_launch(boundary: str) -> None:
    """Rows move by weak accesses, and an arena is used again in the next launch but one."""
    assert has_executions(Exchange(boundary=boundary))
    assert not hole(Exchange(boundary=boundary))


def test_each_block_waits_for_all_blocks_of_a_peer() -> None:
    """Rows of another block are read too."""
    several = Exchange(blocks=2, launches=1)
    assert has_executions(several)
    assert not hole(several)
    assert hole(several, awaited=1) == "old row"


# What is changed, and the failure that the model then finds.
EXCHANGE_BUGS: dict[str, tuple[Mapping[str, object], str]] = {
    "flag relaxed": ({"flag": "st.relaxed.sys"}, "old row"),
    "poll relaxed": ({"poll": "ld.relaxed.sys"}, "old row"),
    "flag at the scope of its GPU": ({"flag": "st.release.gpu"}, "old row"),
    "poll at the scope of its GPU": ({"poll": "ld.acquire.gpu"}, "old row"),
    "no barrier of the block before the flag": ({"sync_before": False}, "old row"),
    "no barrier of the block behind the flags": ({"sync_behind": False}, "old row"),
    "phase forced to 0": ({"phases": 1}, "later row"),
    "boundary makes visible to its own GPU alone": ({"boundary": "visible"}, "later row"),
}


@pytest.mark.parametrize("bug", EXCHANGE_BUGS)
def test_the_model_finds_bugs_in_the_exchange(bug: str) -> None:
    """Each part of the meeting is needed."""
    changes, expected = EXCHANGE_BUGS[bug]
    assert hole(Exchange(), **changes) == expected


def test_mailboxes_bring_the_values_of_their_turn() -> None:
    """Two mailboxes suffice for any number of turns: the third turn uses the first one again."""
    assert has_executions(Mailboxes())
    assert not hole(Mailboxes())


def test_mailboxes_are_open_before_anybody_sends() -> None:
    """The opening is ordered before the first mail."""
    opening = Mailboxes(turns=1, boxes=1, has_opening=True)
    assert has_executions(opening)
    assert not hole(opening)
    assert hole(opening, open="") == "mail lost"
    assert hole(opening, join="ld.relaxed.gpu") == "mail lost"


MAILBOX_BUGS: dict[str, tuple[Mapping[str, object], str]] = {
    "completion relaxed": ({"complete": "st.relaxed.gpu"}, "old mail"),
    "wait relaxed": ({"poll": "ld.relaxed.gpu"}, "old mail"),
    "completion at the scope of its block": ({"complete": "st.release.cta"}, "old mail"),
    "one mailbox": ({"boxes": 1}, "old mail"),
    "no barrier of the block before the sending": ({"sync": False}, "later mail"),
    "the store does not stay behind what its sender did": ({"is_started": False}, "old mail"),
}


@pytest.mark.parametrize("bug", MAILBOX_BUGS)
def test_the_model_finds_bugs_in_the_mailboxes(bug: str) -> None:
    """Each part of the exchange is needed, and so is the assumption about the asynchronous store."""
    changes, expected = MAILBOX_BUGS[bug]
    assert hole(Mailboxes(), **changes) == expected


def test_the_kernels_are_what_the_model_takes_them_for() -> None:
    """The order of the parts in the sources, and how each of them accesses memory."""
    exchange, clusters = ((CUDA / f"{name}.cu").read_text() for name in ("expert_parallel", "clusters"))
    meet = exchange[exchange.index("DEVICE void meet(") : exchange.index("// ---- rows")]
    parts = ("__syncthreads()", "st_release_sys(", "ld_acquire_sys(", "flag != value", "__syncthreads()")
    assert re.search(".*".join(map(re.escape, parts)), meet, re.DOTALL)
    assert "(call.epoch & 1) * PHASE_FLAGS_BYTES" in meet
    assert Exchange().phases == 2
    for kernel, steps in (
        ("expert_dispatch", ("push_tokens(", "meet(", "take_rows(")),
        ("expert_combine", ("push_results(", "meet(", "sum_results(")),
    ):
        text = exchange[exchange.index(f"KERNEL {kernel}(") :].partition("\n}")[0]
        assert re.search(".*".join(map(re.escape, steps)), text, re.DOTALL), kernel
    assert "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32" in clusters
    assert "mbarrier.try_wait.parity.acquire.cluster" in clusters
    assert re.search(
        "mbarrier.init.*fence.mbarrier_init.release.cluster.*arrive.relaxed", clusters, re.DOTALL
    )
    assert "barrier.cluster.wait.acquire;" in clusters
    norm = (CUDA / "add_rms_norm.cu").read_text()
    body = norm[norm.index("DEVICE const float* exchange_groups(") :].partition("\n}")[0]
    order = ("turn % 2", "__syncthreads()", "send_float(", "await_mail(", "turn / 2")
    assert re.search(".*".join(map(re.escape, order)), body, re.DOTALL)
    assert Mailboxes().boxes == 2
