"""Make SGLang's calls in each rank of a world of two, and say what went wrong with each.

A call has the form of the call site: the same arguments by position and by name. `body` runs with our
`parallel_state`; `python -m tests.real_engines.sglang_ranks RANK SIZE FOLDER` with SGLang's own, which creates our
groups by the plugin. The latter reads the calls from FOLDER, and prints one line of JSON.
"""

import ast
import importlib
import itertools
import json
import logging
import sys
import types
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from coordinator.integrations.sglang import parallel_state as ours
from coordinator.integrations.sglang import register
from coordinator.integrations.sglang.group import SglangGroupCoordinator
from tests.real_engines.sglang_calls import CASES, Call
from tests.real_engines.sglang_functions import FUNCTIONS, Place
from tests.real_engines.sglang_run import stand_in_for_the_sampler

# SGLang reads the widths from its server arguments; ours takes them by name.
WIDTHS = ("tensor_model_parallel_size", "decode_context_parallel_size", "shared_experts_tensor_parallel_size")


def number(text: str) -> int | None:
    """Return the whole number that an expression states, or None."""
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def call_method(place: Place, site: Mapping[str, Any]) -> None:
    """Call a method of the tensor-parallel group; raise if its result is wrong."""
    name, order = site["name"], site["parameters"]
    group = place.state.get_tp_group()
    if name == "destroy":
        group = place.state.init_model_parallel_group(
            [place.ranks("tp")], place.rank, "gloo", group_name="new"
        )
    expressions = {**dict(zip(order, site["positional"], strict=False)), **dict(site["named"])}
    # What the site does not state as a number is the default of the method.
    defaults = {"dim": -1, "src": 0, "dst": 0}
    given = {
        key: defaults.get(key) if number(text) is None or key not in defaults else number(text)
        for key, text in expressions.items()
    }
    arguments, check = CASES[name](Call(place.rank, place.size, group, given))
    positional = [arguments[key] for key in order[: len(site["positional"])]]
    check(getattr(group, name)(*positional, **{key: arguments[key] for key, _ in site["named"]}))


def call_function(place: Place, site: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """Call a function of `parallel_state` with the arguments `extra` added; raise if its result is wrong."""
    name = site["name"]
    by_place = site["parameters"][: len(site["positional"])]
    place.given = {*by_place, *(key for key, _ in site["named"])}
    arguments, check = FUNCTIONS[name](place)
    positional = [arguments[key] for key in by_place]
    named = {key: arguments[key] for key, _ in site["named"]}
    check(getattr(place.state, name)(*positional, **named, **extra))


def outcomes(place: Place, sites: list[dict[str, Any]], widths: Mapping[str, int]) -> list[str]:
    """Make every call in turn; return "" for each whose result is right, else what went wrong."""
    found = []
    for site in sites:
        text = ""
        try:
            with ExitStack() as place.stack:
                if site["is_method"]:
                    call_method(place, site)
                else:
                    added = widths if site["name"] == "initialize_model_parallel" else {}
                    call_function(place, site, added)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        found.append(text)
    return found


def place_in(state: Any, rank: int, size: int, directory: Path, divide: Callable[[], None]) -> Place:
    """Return where the calls are made; each world that is opened there has a file of its own."""
    worlds = itertools.count()

    def method() -> str:
        return f"file://{directory}/world-{next(worlds)}"

    def start() -> None:
        state.init_distributed_environment(size, rank, method(), rank, "gloo")

    return Place(state, rank, size, set(), start, divide, method, ExitStack())


def body(rank: int, size: int, directory: Path, sites: list[dict[str, Any]]) -> list[str]:
    """Make every call with our functions."""
    widths = dict.fromkeys(WIDTHS, size)
    state: Any = types.SimpleNamespace(**vars(ours), GroupCoordinator=SglangGroupCoordinator)
    place = place_in(
        state,
        rank,
        size,
        directory,
        lambda: state.initialize_model_parallel(duplicate_tp_group=True, **widths),
    )
    place.restart()
    try:
        return outcomes(place, sites, widths)
    finally:
        ours.destroy_distributed_environment()


def names(rank: int, size: int, directory: Path) -> list[str]:
    """Return the public names of a group."""
    ours.init_distributed_environment(size, rank, f"file://{directory}/world", rank, "gloo")
    try:
        return [name for name in dir(ours.get_world_group()) if not name.startswith("_")]
    finally:
        ours.destroy_distributed_environment()


def stand_in_for_bootstrap() -> None:
    """Give the end of the groups the function that it calls: the module itself imports SGLang's models."""
    module: Any = types.ModuleType("sglang.srt.distributed.bootstrap")
    module.reset_parallel_initialised = lambda: None
    sys.modules[module.__name__] = module


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    rank, size, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    stand_in_for_the_sampler()
    stand_in_for_bootstrap()
    register()
    state: Any = importlib.import_module("sglang.srt.distributed.parallel_state")
    # Its `initialize_model_parallel` asks this alone, and refuses a decode context group on a CPU.
    state.is_cuda = lambda: True
    parallel = importlib.import_module("sglang.srt.runtime_context").get_parallel()
    one = {"moe_ep_size": 1, "attn_dp_size": 1, "attn_cp_size": 1, "moe_dp_size": 1, "pp_size": 1}
    all_ranks = {"tp_size": size, "attn_dcp_size": size, "shared_experts_tp_size": size}
    sites = json.loads((directory / "sites.json").read_text())
    place = place_in(
        state, rank, size, directory, lambda: state.initialize_model_parallel(duplicate_tp_group=True)
    )
    with parallel.override(**one, **all_ranks):
        place.restart()
        found = outcomes(place, sites, {})
        place.end()
    print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
