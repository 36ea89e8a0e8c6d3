"""What README.md says is verified, and which tests on a GPU show it, so that a report can answer claim by claim."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.gpu.steps import STEPS

__all__ = ["CLAIMS", "NOT_LAUNCHED", "Statement", "matches", "verdict"]

_WHOLE_SUITE = "`make test` runs the whole suite, a session on a GPU does not"
_ONE_GPU = "needs several GPUs"

NOT_LAUNCHED = (
    "multimem_two_shot",
    "multimem_one_shot",
)
"""Kernels that no test on a device runs: statements below say so."""


@dataclasses.dataclass(frozen=True)
class Statement:
    """A part of a claim.

    Attributes:
        text: What is claimed.
        tests: "group::name" of tests that show it together, without the "test_" of a name and the "[...]" of its
            parameters; a group alone stands for all its tests.
        why_not: If no test on one GPU can show it, why.
    """

    text: str
    tests: tuple[str, ...] = ()
    why_not: str = ""


CLAIMS: dict[str, tuple[Statement, ...]] = {
    "x86-64, Linux 6.18, Python 3.11 and 3.13, torch 2.13 (CPU)": (
        Statement("the whole suite passes", why_not=_WHOLE_SUITE),
    ),
    "Python 3.12 and 3.14": (Statement("the whole suite passes", why_not=_WHOLE_SUITE),),
    "several hosts": (Statement("the suite over several hosts passes", why_not="needs several hosts"),),
    "CUDA sums, gathers and norms of 16 or 32 bits": (
        Statement(
            "a machine with a GPU compiles and loads them",
            ("emulation::the_kernels_compile_for_the_emulation",),
        ),
        Statement(
            "all sums, gathers and fused norms of 16 or 32 bits give the defined bits, for every dtype and world size,"
            " all ranks in one launch",
            (
                "emulation::emulated_ranks_get_the_right_bits",
                "emulation::odd_numbers_of_emulated_ranks_get_the_right_bits",
            ),
        ),
        Statement(
            "ranks on streams of their own get the defined bits, in calls and in replayed graphs",
            (
                "streams::streams_reduce_eagerly_and_in_graphs",
                "streams::work_on_the_default_stream_is_waited_for",
            ),
        ),
        Statement(
            "processes that share memory over CUDA IPC, or by descriptors, get the defined bits",
            ("probe::two_processes_share_memory", "processes::a_group_of_processes_has_a_whole_life"),
        ),
        Statement(
            "a group of the coordinator calls them, in calls and in captures",
            ("processes::a_group_of_the_coordinator_uses_our_kernels",),
        ),
        Statement(
            "a rank that dies, stops or does not call is named within the deadline",
            ("processes::a_lost_rank_is_named", "streams::a_rank_that_does_not_launch_is_named"),
        ),
        Statement(
            "kernels with a planted mistake are noticed, and delays alone change nothing",
            ("controls", "emulation::a_wrong_sum_is_noticed"),
        ),
        Statement(
            "compute-sanitizer finds no bad access and no race in shared memory",
            ("emulation::the_sanitizer_finds_nothing",),
        ),
        Statement(
            "groups called in opposite order, forked captures and compiled graphs give the defined bits or a typed"
            " error",
            ("patterns",),
        ),
    ),
    "CUDA norms with 8 or 4 bits, sums of experts": (
        Statement(
            "norms with an output of 8 or 4 bits, and sums of experts, fused and alone, give the defined bits, all"
            " ranks in one launch",
            ("emulation::emulated_ranks_fuse_norms_and_sums_of_experts",),
        ),
    ),
    "CUDA dispatch and combine of experts": (
        Statement(
            "tokens are dispatched to experts and combined with the defined bits, all ranks in one launch",
            ("emulation::emulated_ranks_exchange_their_tokens",),
        ),
        Statement(
            "a graph of both can be replayed with other tokens",
            ("emulation::emulated_exchanges_can_be_replayed",),
        ),
    ),
    "CUDA multimem, mailboxes of clusters": (
        Statement("multimem sums are near the exact sum and equal on all ranks", why_not=_ONE_GPU),
        Statement(
            "blocks of a cluster exchange their squares through mailboxes, in fused norms and alone",
            ("streams::norms_whose_rows_need_a_cluster_are_right",),
        ),
    ),
    "NCCL, its symmetric windows (`cuda.nccl_window_bytes`, off by default) included": (
        Statement(
            "with one rank it works through our bindings, in calls and in a capture",
            ("oracles::nccl_with_one_rank_runs_eagerly", "oracles::nccl_with_one_rank_can_be_captured"),
        ),
        Statement(
            "with one rank a symmetric window is registered, stages sums, in calls and in a capture, and is freed",
            ("oracles::nccl_with_one_rank_has_a_window",),
        ),
        Statement("sums of several ranks are staged through symmetric windows", why_not=_ONE_GPU),
        Statement(
            "two ranks on one GPU get a typed error in time",
            ("oracles::nccl_with_two_ranks_on_one_gpu_fails_cleanly",),
        ),
        Statement("it carries calls between GPUs", why_not=_ONE_GPU),
    ),
    "rebuilding and planned changes on GPUs or between hosts": (
        Statement("the ranks that are left go on after one on another GPU was lost", why_not=_ONE_GPU),
    ),
    "NVLink, several GPUs, multimem, MIG; hosts with several NUMA nodes": (
        Statement("ranks on several GPUs get the defined bits", why_not=_ONE_GPU),
    ),
    "ARM": (Statement("the suite passes on ARM", why_not="needs an ARM machine"),),
}
"""By the first cell of a row of README.md's table "What is verified"."""


def matches(pattern: str, name: str) -> bool:
    """Return whether "group::name[parameters]" is one of the tests that `pattern` stands for."""
    return pattern in (name.partition("::")[0], name.partition("[")[0])


def verdict(statement: Statement, tests: Mapping[str, Mapping[str, Any]], parts: Iterable[int | None]) -> str:
    """Return "shown", "refuted (test)" or "not run (reason)".

    Args:
        statement: A statement of `CLAIMS`.
        tests: Results by "group::name[parameters]", with outcome, reason and in_setup: a test whose preparation failed
            did not run.
        parts: The parts that were run; None stands for all.
    """
    if not statement.tests:
        return f"not run ({statement.why_not})"
    found = [
        (name, test)
        for name, test in tests.items()
        if any(matches(pattern, name) for pattern in statement.tests)
    ]
    failed = [name for name, test in found if test["outcome"] == "failed" and not test["in_setup"]]
    if failed:
        return f"refuted ({', '.join(failed)})"
    for pattern in statement.tests:
        if not any(matches(pattern, name) for name, _ in found):
            return f"not run ({_why_absent(pattern, list(parts))})"
    for name, test in found:
        if test["outcome"] in ("skipped", "failed"):
            return f"not run ({name}: {test['reason']})"
        if test["outcome"] != "passed":
            return f"not run ({name} had not ended)"
    return "shown"


def _why_absent(pattern: str, parts: Sequence[int | None]) -> str:
    part = STEPS[pattern.partition("::")[0]].part
    if None not in parts and part not in parts:
        return f"part {part} of the session was not run"
    return f"{pattern} was not run"
