"""Run every call that SGLang makes on its groups against ours: `python -m tests.real_engines.sglang_table WHEEL`.

WHEEL is the folder of an unpacked wheel of SGLang; it is read, not imported. The table goes to the standard output.
`docs/sglang-call-sites.md` is the result for the version that it names.
"""

import ast
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.harness import run_ranks
from tests.real_engines import sglang_calls, sglang_sites
from tests.real_engines.sglang_sites import Site

# What no group without SGLang's CUDA communicators can answer.
NOT_RUNNABLE = {
    "_flashinfer_allreduce": "needs FlashInfer's workspace on a CUDA device",
    "_all_reduce_out_place": "names one of SGLang's own CUDA communicators, which our group does not have; SGLang "
    "calls it only from its own group",
}


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of one call site.

    Attributes:
        site: The call.
        cause: Why it cannot run with CPU tensors; "" if it can.
        failure: What went wrong when it ran; "" if nothing did.
    """

    site: Site
    cause: str
    failure: str


def parameters(wheel: Path) -> dict[str, list[str]]:
    """Return the parameters of each method of SGLang's group, without `self`."""
    tree = sglang_sites.parse(wheel / sglang_sites.STATE)
    (group,) = (
        each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == sglang_sites.CLASS
    )
    return {
        each.name: [one.arg for one in each.args.args][1:]
        for each in group.body
        if isinstance(each, ast.FunctionDef)
    }


def results(wheel: Path) -> list[Result]:
    """Run every call site that needs no GPU on two ranks."""
    orders = parameters(wheel)
    sites = sglang_sites.find(wheel)
    runnable = [site for site in sites if site.name not in NOT_RUNNABLE]
    sent: list[dict[str, Any]] = [
        {
            "name": site.name,
            "is_method": bool(site.receiver),
            "positional": list(site.positional),
            "named": [list(each) for each in site.named],
            "parameters": orders.get(site.name, []),
        }
        for site in runnable
    ]
    by_rank = run_ranks(sglang_calls.body, 2, sent, timeout_s=120)
    failures = {
        site: "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
        for site, *texts in zip(runnable, *by_rank, strict=True)
    }
    return [Result(site, NOT_RUNNABLE.get(site.name, ""), failures.get(site, "")) for site in sites]


def our_attributes() -> set[str]:
    """Return the names of a group of ours, made in one process."""
    (found,) = run_ranks(sglang_calls.names, 1)
    return set(found)


def table(version: str, found: Sequence[Result]) -> str:
    """Return the results as Markdown."""
    ran = sum(not each.cause and not each.failure for each in found)
    reachable = sum(not each.cause for each in found)
    lines = [
        f"# Call sites of SGLang {version}",
        "",
        "Every call in `sglang.srt` of a method of SGLang's `GroupCoordinator`, and of a getter of its",
        "`parallel_state`, found by reading its source. Each was made on `SglangGroupCoordinator`, in its form, on",
        "two ranks with CPU tensors, and its result compared with plain arithmetic. Left out: SGLang's group itself,",
        "its tests, and `multimodal_gen`, which has a group of its own. Arguments stand for their place or name:",
        "SGLang's own tensors need its models.",
        "",
        f"{len(found)} call sites; {reachable} can be reached with CPU tensors; {ran} of these give the right result.",
        "Written by `python -m tests.real_engines.sglang_table WHEEL`.",
        "",
        "| file in `sglang/srt` | line | call | result |",
        "|---|---|---|---|",
    ]
    for each in found:
        site = each.site
        call = f"{site.receiver}.{site.form}" if site.receiver else site.form
        outcome = (
            f"not runnable: {each.cause}"
            if each.cause
            else f"fails: {each.failure}"
            if each.failure
            else "runs"
        )
        cells = (site.path.removeprefix("sglang/srt/"), str(site.line), f"`{call}`", outcome)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    wheel = Path(sys.argv[1])
    print(table(sglang_sites.version_of(wheel), results(wheel)))


if __name__ == "__main__":
    main()
