"""Run every call that SGLang makes on its groups against ours: `python -m tests.real_engines.sglang_table WHEEL`.

WHEEL is the folder that `python -m tests.real_engines.sglang_environment` fills: SGLang's unpacked wheel, which is
read, and what its distributed layer imports. The table goes to the standard output. `docs/sglang-call-sites.md` is the
result for the version that it names.
"""

import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordinator.integrations.sglang import parallel_state
from tests.harness import run_ranks
from tests.real_engines import sglang_left_out, sglang_processes, sglang_ranks, sglang_sites
from tests.real_engines.sglang_sites import Site

# What no group without SGLang's CUDA communicators can answer.
NOT_RUNNABLE = {
    "_flashinfer_allreduce": "needs FlashInfer's workspace on a CUDA device",
    "_all_reduce_out_place": "names one of SGLang's own CUDA communicators, which our group does not have; SGLang "
    "calls it only from its own group",
    "inplace_all_reduce": "SGLang registers this operation for the tensors of accelerators only; the method of our "
    "group that it calls is a site of its own",
}
OURS = {*parallel_state.__all__, sglang_sites.CLASS}


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

    @property
    def outcome(self) -> str:
        """Return that in words."""
        if self.cause:
            return f"not runnable: {self.cause}"
        return f"fails: {self.failure}" if self.failure else "runs"


def cause(site: Site) -> str:
    """Return why a call cannot be made with CPU tensors; "" if it can."""
    if ("backend", "'nccl'") in site.named:
        return "asks for a process group of NCCL, which needs CUDA devices"
    return NOT_RUNNABLE.get(site.name, "")


def callee(site: Site) -> str:
    """Return what is called."""
    if site.receiver:
        return "our group"
    return "ours and SGLang's" if site.name in OURS else "SGLang's"


def results(wheel: Path, sites: Sequence[Site]) -> list[Result]:
    """Make every call that needs no GPU on two ranks: methods and our functions, then SGLang's own functions."""
    orders = {False: sglang_sites.functions(wheel), True: sglang_sites.methods(wheel)}
    with_ours = [site for site in sites if not cause(site) and callee(site) != "SGLang's"]
    with_theirs = [site for site in sites if not cause(site) and not site.receiver]

    def sent(some: Sequence[Site]) -> list[dict[str, Any]]:
        return [_sent(site, orders[bool(site.receiver)][site.name]) for site in some]

    failures: dict[Site, list[str]] = {site: [] for site in sites}
    by_rank = run_ranks(sglang_ranks.body, 2, sent(with_ours), timeout_s=240)
    for site, *texts in zip(with_ours, *by_rank, strict=True):
        failures[site] += [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sites.json").write_text(json.dumps(sent(with_theirs)))
        by_rank = sglang_processes.run_both("tests.real_engines.sglang_ranks", wheel, folder)
    for site, *texts in zip(with_theirs, *by_rank, strict=True):
        failures[site] += [f"rank {rank} in SGLang's: {text}" for rank, text in enumerate(texts) if text]
    return [Result(site, cause(site), "; ".join(failures[site])) for site in sites]


def _sent(site: Site, order: Sequence[str]) -> dict[str, Any]:
    # A method that is passed on is called with all its arguments by position.
    positional = ["_"] * len(order) if site.is_value else list(site.positional)
    return {
        "name": site.name,
        "is_method": bool(site.receiver),
        "positional": positional,
        "named": [list(each) for each in site.named],
        "parameters": list(order),
    }


def our_attributes() -> set[str]:
    """Return the names of a group of ours, made in one process."""
    (found,) = run_ranks(sglang_ranks.names, 1)
    return set(found)


HEADER = """\
Every call in `sglang.srt` of a method of SGLang's `GroupCoordinator` on a group, every such method that is passed on
as a value, and every call of a function or class of `sglang.srt.distributed.parallel_state` (private ones if another
module imports them), found by reading its source. The source of SGLang's group itself and `multimodal_gen`, which has
a group of its own, were not searched.

Each call was made in its form on two ranks with CPU tensors, and what came of it was compared with what must come of
it: by plain arithmetic for the methods, with the ranks of each group for the functions that return or create groups.
Arguments stand for their place or name: SGLang's own tensors need its models. The fourth column says what was called:

* our group: the method of `SglangGroupCoordinator`, always on the group of both ranks, whatever group the site names;
* ours: the function of `coordinator.integrations.sglang.parallel_state`; `initialize_model_parallel` also gets the
  widths by name, which SGLang's reads from its server arguments;
* SGLang's: its own function, imported from its wheel with the plugin, so that it creates and uses our groups. Its
  sampler, its `bootstrap` and its question for a CUDA device, without which it refuses decode context groups, have
  stand-ins."""

LEFT_OUT = """\
## Left out

Calls whose method has the name of one of a group's, or whose function that of one of `parallel_state`, on something
else. A group is recognised by the name of the expression; every other receiver was looked up in SGLang's source, and
the test fails at one that is not in this table. `…` stands for what is in the brackets."""


def table(version: str, found: Sequence[Result], left_out: Sequence[Site]) -> str:
    """Return the results as Markdown."""
    reachable = sum(not each.cause for each in found)
    right = sum(not each.cause and not each.failure for each in found)
    methods = sum(bool(each.site.receiver) for each in found)
    of_what = f"{methods} of methods, {len(found) - methods} of functions"
    lines = [
        f"# Call sites of SGLang {version}",
        "",
        *HEADER.splitlines(),
        "",
        f"{len(found)} call sites: {of_what}. {reachable} can be made with",
        f"CPU tensors; {right} of these give the right result.",
        "Written by `python -m tests.real_engines.sglang_table WHEEL`.",
        "",
        "| file in `sglang/srt` | line | call | called | result |",
        "|---|---|---|---|---|",
        *(_line(each) for each in found),
        "",
        *LEFT_OUT.splitlines(),
        "",
        "| receivers | calls | why they are no group |",
        "|---|---|---|",
        *(_left_out_line(each) for each in sglang_left_out.rows(left_out)),
    ]
    return "\n".join(lines)


def _line(result: Result) -> str:
    site = result.site
    call = f"{site.receiver}.{site.form}" if site.receiver else site.form
    where = site.path.removeprefix("sglang/srt/")
    return f"| {where} | {site.line} | `{call}` | {callee(site)} | {result.outcome} |"


def _left_out_line(row: sglang_left_out.Row) -> str:
    names = ", ".join(
        f"`{name}`" if count == 1 else f"`{name}` ({count})" for name, count in sorted(row.counts.items())
    )
    return f"| {names} | {row.counts.total()} | {row.text} |"


def main() -> None:
    wheel = Path(sys.argv[1])
    scan = sglang_sites.scan(wheel)
    print(table(sglang_sites.version_of(wheel), results(wheel, scan.sites), scan.left_out))


if __name__ == "__main__":
    main()
