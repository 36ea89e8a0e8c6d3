"""The model of PTX admits what the published litmus tests say is allowed, and nothing that they say is forbidden.

Sources: "ISA" is NVIDIA's PTX ISA with the section of its chapter on memory. "ASPLOS" is Lustig, Sahasrabuddhe and
Giroux, 2019, with the figure. "Dat3M" is github.com/hernanponcedeleon/Dat3M, folder litmus/PTX, with the file, and
the result that its PTXv6_0-expected.csv names; those in Memalloy come from multicore.doc.ic.ac.uk/gpu-litmus, those
in Nvidia from github.com/NVlabs/mixedproxy. "derived" marks what no source states and the named rule gives. Memory
starts as zeros.
"""

from collections.abc import Mapping
from typing import NamedTuple

import pytest

from tests.native.model.ptx_model import Program, Thread, is_allowed

__all__ = ["LITMUS", "Litmus"]


class Litmus(NamedTuple):
    """A litmus test.

    Attributes:
        source: Where its result is published.
        allowed: That result.
        outcome: The registers and final values that it asks for, as "r=1 x=0".
        threads: By place, "GPU.CTA" and a letter to tell threads of one CTA apart: operations separated by semicolons.
    """

    source: str
    allowed: bool
    outcome: str
    threads: Mapping[str, str]


def two(first: str, second: str, places: str = "0.0 0.1") -> dict[str, str]:
    """Return two threads, by default of two CTAs."""
    return dict(zip(places.split(), (first, second), strict=True))


def four(writes: tuple[str, str], reads: tuple[str, str]) -> dict[str, str]:
    """Return the threads of IRIW, in four CTAs."""
    return {"0.0": writes[0], "0.1": reads[0], "0.2": writes[1], "0.3": reads[1]}


SB = ("st.weak x 1; {}; ld.weak r y", "st.weak y 1; {}; ld.weak s x")
MP_FLAG = ("st.weak x 1; st.{}.{} y 1", "ld.{}.{} r y; ld.weak s x")
MP_FENCE = (
    "st.weak x 1; fence.acq_rel.{0}; st.relaxed.{0} y 1",
    "ld.relaxed.{0} r y; fence.acq_rel.{0}; ld.weak s x",
)
IRIW_READS = ("ld.relaxed.sys a x; {0}; ld.relaxed.sys b y", "ld.relaxed.sys c y; {0}; ld.relaxed.sys d x")
ATOM = "atom.relaxed.{}"

LITMUS = {
    # Message passing.
    "MP, fences": Litmus("ISA, Causality", False, "r=1 s=0", two(*(text.format("sys") for text in MP_FENCE))),
    "MP, release and acquire": Litmus(
        "ASPLOS 5",
        False,
        "r=1 s=0",
        two(MP_FLAG[0].format("release", "gpu"), MP_FLAG[1].format("acquire", "gpu")),
    ),
    "MP, relaxed": Litmus(
        "Dat3M Manual/MP-relaxed",
        True,
        "r=1 s=0",
        two(MP_FLAG[0].format("relaxed", "sys"), MP_FLAG[1].format("acquire", "sys")),
    ),
    "MP, narrow scope, one CTA": Litmus(
        "Dat3M Manual/MP-cta-gpu",
        False,
        "r=1 s=0",
        two(MP_FLAG[0].format("release", "cta"), MP_FLAG[1].format("acquire", "gpu"), places="0.0a 0.0b"),
    ),
    "MP, narrow scope, two CTAs": Litmus(
        "derived: ISA, Morally strong operations",
        True,
        "r=1 s=0",
        two(MP_FLAG[0].format("release", "cta"), MP_FLAG[1].format("acquire", "gpu")),
    ),
    "MP, fence of narrow scope, two CTAs": Litmus(
        "derived: ISA, Memory synchronization 4",
        True,
        "r=1 s=0",
        two("st.weak x 1; fence.acq_rel.cta; st.relaxed.sys y 1", MP_FENCE[1].format("sys")),
    ),
    "MP, other GPU": Litmus(
        "derived: ISA, Scope",
        True,
        "r=1 s=0",
        two(MP_FENCE[0].format("gpu"), MP_FENCE[1].format("gpu"), places="0.0 1.0"),
    ),
    "MP, later relaxed write": Litmus(
        "Dat3M Nvidia/Release-acquire-pattern",
        False,
        "r=2 s=0",
        two(
            "st.weak y 1; st.release.sys x 1; st.relaxed.sys x 2",
            "ld.relaxed.sys r x; fence.acq_rel.sys; ld.weak s y",
        ),
    ),
    "MP, through an atomic operation": Litmus(
        "Dat3M Manual/MP+RMW",
        False,
        "q=1 r=2 s=0",
        {
            "0.0": "st.weak x 1; st.release.gpu y 1",
            "0.1": f"{ATOM.format('gpu')} q y 1",
            "0.2": "ld.acquire.gpu r y; ld.weak s x",
        },
    ),
    "MP, barrier": Litmus(
        "derived: ISA, Memory synchronization 2",
        False,
        "s=0",
        two("st.weak x 1; bar.sync b", "bar.sync b; ld.weak s x", places="0.0a 0.0b"),
    ),
    "MP, barriers of two CTAs": Litmus(
        "derived: ISA, Memory synchronization 2",
        True,
        "s=0",
        two("st.weak x 1; bar.sync b", "bar.sync b; ld.weak s x"),
    ),
    # Store buffering.
    "SB, fence.sc": Litmus(
        "ISA, Causality; ASPLOS 6", False, "r=0 s=0", two(*(text.format("fence.sc.sys") for text in SB))
    ),
    "SB, fence.acq_rel": Litmus(
        "ISA, Causality", True, "r=0 s=0", two(*(text.format("fence.acq_rel.sys") for text in SB))
    ),
    "SB, fence.sc not morally strong": Litmus(
        "ASPLOS 6; Dat3M Manual/SB+sc-cta-outScope",
        True,
        "r=0 s=0",
        two(*(text.format("fence.sc.cta") for text in SB)),
    ),
    # Load buffering.
    "LB": Litmus(
        "ISA, No thin air", True, "r=1 s=1", two("ld.weak r x; st.weak y 1", "ld.weak s y; st.weak x 1")
    ),
    "LB, dependencies": Litmus(
        "ISA, No thin air; ASPLOS 8",
        False,
        "r=42 s=42",
        two("ld.weak r x; st.weak y r", "ld.weak s y; st.weak x s"),
    ),
    "LB, weak": Litmus(
        "derived: ISA, Causality 1",
        False,
        "r=1 s=1",
        two("ld.acquire.gpu r y; st.weak x 1", "ld.weak s x; st.release.gpu y 1"),
    ),
    "LB, release and acquire": Litmus(
        "Dat3M Manual/LB+RMW-b",
        False,
        "r=1 s=1",
        two("ld.acquire.gpu r y; st.weak x 1", "ld.relaxed.gpu s x; st.release.gpu y 1"),
    ),
    # Coherence of one location.
    "CoRR": Litmus(
        "ISA, SC per location; ASPLOS 9a",
        False,
        "r=1 s=0",
        two("st.relaxed.gpu x 1", "ld.relaxed.gpu r x; ld.weak s x"),
    ),
    "CoRR, weak": Litmus(
        "Dat3M Manual/CoRR-weak-weak", True, "r=1 s=0", two("st.weak x 1", "ld.weak r x; ld.weak s x")
    ),
    "CoRW": Litmus(
        "ASPLOS 9b", False, "r=1 x=1", two("st.relaxed.gpu x 1", "ld.relaxed.gpu r x; st.weak x 2")
    ),
    "CoWR": Litmus(
        "ASPLOS 9c", False, "r=1 x=2", two("st.relaxed.gpu x 1", "st.relaxed.gpu x 2; ld.weak r x")
    ),
    "CoWW": Litmus("ASPLOS 9d", False, "x=1", {"0.0": "st.weak x 1; st.weak x 2"}),
    "CoWW, weak reader": Litmus(
        "Dat3M Manual/CoWW-RR", True, "r=2 s=1", two("st.weak x 1; st.weak x 2", "ld.weak r x; ld.weak s x")
    ),
    "Co, racy writes are not ordered": Litmus(
        "Dat3M Manual/Co-Total-4-threads",
        True,
        "a=1 b=1 c=1 d=1 e=1 f=2",
        {
            "0.0": "st.weak x 1; st.release.sys p 1",
            "0.1": "st.weak x 2; st.release.sys q 1",
            "0.2": "ld.acquire.sys a p; ld.acquire.sys b q; ld.weak c x",
            "0.3": "ld.acquire.sys d p; ld.acquire.sys e q; ld.weak f x",
        },
    ),
    # Atomicity.
    "two additions": Litmus(
        "ISA, Atomicity 1", False, "x=1", two(f"{ATOM.format('sys')} r x 1", f"{ATOM.format('sys')} s x 1")
    ),
    "two additions, scope too narrow": Litmus(
        "ISA, Atomicity 2", True, "x=1", two(f"{ATOM.format('cta')} r x 1", f"{ATOM.format('gpu')} s x 1")
    ),
    # Three and four threads. PTX is not multi-copy atomic (ASPLOS 3.4): reads must be synchronized.
    "IRIW, relaxed": Litmus(
        "derived: ASPLOS 3.4, not multi-copy atomic",
        True,
        "a=1 b=0 c=1 d=0",
        four(
            ("st.relaxed.sys x 1", "st.relaxed.sys y 1"),
            (IRIW_READS[0].format("fence.acq_rel.sys"), IRIW_READS[1].format("fence.acq_rel.sys")),
        ),
    ),
    "IRIW, fence.sc": Litmus(
        "derived: ISA, Fence-SC order",
        False,
        "a=1 b=0 c=1 d=0",
        four(
            ("st.relaxed.sys x 1", "st.relaxed.sys y 1"),
            (IRIW_READS[0].format("fence.sc.sys"), IRIW_READS[1].format("fence.sc.sys")),
        ),
    ),
    "IRIW, weak": Litmus(
        "Dat3M Memalloy/IRIW1",
        True,
        "a=1 b=0 c=1 d=0",
        four(
            ("st.weak x 1", "st.weak y 1"),
            ("ld.weak a x; fence.sc.cta; ld.weak b y", "ld.weak c y; fence.sc.gpu; ld.weak d x"),
        ),
    ),
    "ISA2, scopes grow": Litmus(
        "Dat3M Manual/MP-3-transitive",
        False,
        "q=1 r=1 s=0",
        {
            "0.0a": "st.weak x 1; st.release.cta y 1",
            "0.0b": "ld.acquire.cta q y; st.release.gpu z 1",
            "0.1": "ld.acquire.gpu r z; ld.weak s x",
        },
    ),
    "ISA2, the second hop is relaxed": Litmus(
        "derived: ISA, Release and acquire patterns",
        True,
        "q=1 r=1 s=0",
        {
            "0.0": "st.weak x 1; st.release.gpu y 1",
            "0.1": "ld.acquire.gpu q y; st.relaxed.gpu z 1",
            "0.2": "ld.acquire.gpu r z; ld.weak s x",
        },
    ),
    "WRC, fence of the writer too narrow": Litmus(
        "Dat3M Memalloy/WRC1",
        True,
        "q=1 r=1 s=0",
        {
            "0.0": "st.weak x 1",
            "0.1a": "ld.weak q x; fence.sc.cta; st.weak y 1",
            "0.1b": "ld.weak r x; fence.sc.gpu; ld.weak s y",
        },
    ),
    "two readers, one order of strong writes": Litmus(
        "Dat3M Manual/Coherence",
        False,
        "a=1 b=2 c=2 d=1",
        four(
            ("st.relaxed.sys x 1", "st.relaxed.sys x 2"),
            ("ld.acquire.sys a x; ld.acquire.sys b x", "ld.acquire.sys c x; ld.acquire.sys d x"),
        ),
    ),
    "S, nothing releases the later write": Litmus(
        "Dat3M Manual/CoRW-WW",
        True,
        "r=5 y=4",
        two("ld.acquire.sys r x; st.release.sys y 3", "st.release.sys y 4; st.relaxed.sys x 5"),
    ),
    "WRC": Litmus(
        "derived: ISA, Causality order 2",
        False,
        "q=1 r=1 s=0",
        {
            "0.0": "st.relaxed.gpu x 1",
            "0.1": "ld.relaxed.gpu q x; st.release.gpu y 1",
            "0.2": "ld.acquire.gpu r y; ld.relaxed.gpu s x",
        },
    ),
    "WRC, weak write": Litmus(
        "derived: ISA, Observation order",
        True,
        "q=1 r=1 s=0",
        {
            "0.0": "st.weak x 1",
            "0.1": "ld.relaxed.gpu q x; st.release.gpu y 1",
            "0.2": "ld.acquire.gpu r y; ld.relaxed.gpu s x",
        },
    ),
    "2+2W": Litmus(
        "derived: ASPLOS 3.4, coherence order does not synchronize",
        True,
        "x=1 y=1",
        two(
            "st.relaxed.gpu x 1; fence.acq_rel.gpu; st.relaxed.gpu y 2",
            "st.relaxed.gpu y 1; fence.acq_rel.gpu; st.relaxed.gpu x 2",
        ),
    ),
    "2+2W, fence.sc": Litmus(
        "derived: ISA, Coherence and Fence-SC",
        False,
        "x=1 y=1",
        two(
            "st.relaxed.gpu x 1; fence.sc.gpu; st.relaxed.gpu y 2",
            "st.relaxed.gpu y 1; fence.sc.gpu; st.relaxed.gpu x 2",
        ),
    ),
    "S": Litmus(
        "derived: ISA, Coherence",
        False,
        "r=1 x=2",
        two("st.weak x 2; st.release.gpu y 1", "ld.acquire.gpu r y; st.weak x 1"),
    ),
    "R": Litmus(
        "derived: ASPLOS 3.4.3",
        True,
        "y=2 r=0",
        two(
            "st.relaxed.gpu x 1; st.release.gpu y 1",
            "st.relaxed.gpu y 2; fence.acq_rel.gpu; ld.acquire.gpu r x",
        ),
    ),
    "R, fence.sc": Litmus(
        "derived: ISA, Fence-SC",
        False,
        "y=2 r=0",
        two(
            "st.relaxed.gpu x 1; fence.sc.gpu; st.relaxed.gpu y 1",
            "st.relaxed.gpu y 2; fence.sc.gpu; ld.relaxed.gpu r x",
        ),
    ),
    # A stream is a sequence of grids (ISA, API synchronization). "visible" is an assumption of ours, which is weaker.
    "MP, stream": Litmus(
        "derived: ISA, API synchronization",
        False,
        "s=0",
        two("st.weak x 1; signal end", "wait end; ld.weak s x"),
    ),
    "MP, a later grid releases what an earlier one wrote": Litmus(
        "derived: ISA, API synchronization; note on cumulativity",
        False,
        "r=1 s=0",
        {
            "0.0": "st.weak x 1; signal end",
            "0.1": "wait end; st.release.sys y 1",
            "1.0": "ld.acquire.sys r y; ld.weak s x",
        },
    ),
    "MP, visibility alone is not released": Litmus(
        "derived: definition of `publish`",
        True,
        "r=1 s=0",
        {
            "0.0": "st.weak x 1; publish end",
            "0.1": "observe end; st.release.sys y 1",
            "1.0": "ld.acquire.sys r y; ld.weak s x",
        },
    ),
    "MP, the next grid's fence acquires nothing": Litmus(
        "derived: ISA, Release and acquire patterns, which lie in program order; Program order, which is of one thread",
        True,
        "r=1 s=0",
        {
            "0.0": "st.weak x 1; fence.acq_rel.sys; st.relaxed.sys y 1",
            "1.0": "ld.relaxed.sys r y; signal end",
            "1.1": "wait end; fence.acq_rel.sys; ld.weak s x",
        },
    ),
}


@pytest.mark.parametrize("name", LITMUS)
def test_outcomes_of_litmus_tests(name: str) -> None:
    """Each outcome is allowed or forbidden as its source says."""
    test = LITMUS[name]
    threads = []
    for place, text in test.threads.items():
        gpu, cta = place.rstrip("ab").split(".")
        threads.append(Thread(int(gpu), int(cta), text.split("; ")))
    outcome = {name: int(value) for name, _, value in (pair.partition("=") for pair in test.outcome.split())}
    assert is_allowed(Program(threads), outcome) == test.allowed, test.source


def test_enough_results_are_published_ones() -> None:
    """Most of the table is not our own conclusion, and both results occur among what is published."""
    published = [test for test in LITMUS.values() if not test.source.startswith("derived")]
    assert len(published) >= 20
    assert {test.allowed for test in published} == {True, False}


def test_final_values_of_racing_writes_are_both_possible() -> None:
    """Two weak writes of a race stand in no coherence order: either may be last."""
    program = Program([Thread(0, 0, ["st.weak x 1"]), Thread(0, 1, ["st.weak x 2"])])
    assert [is_allowed(program, {"x": value}) for value in (0, 1, 2)] == [False, True, True]


def test_elements_of_a_vector_are_not_ordered() -> None:
    """A vector's words may arrive in any order, even if a release follows one of them in the text (8.2.4)."""
    reader = Thread(0, 1, ["ld.acquire.sys r y", "ld.weak s x"])
    outcome = {"r": 1, "s": 0}
    vector = Program([Thread(0, 0, [["st.weak x 1", "st.release.sys y 1"]]), reader])
    scalars = Program([Thread(0, 0, ["st.weak x 1", "st.release.sys y 1"]), reader])
    assert is_allowed(vector, outcome)
    assert not is_allowed(scalars, outcome)
