"""Make SGLang's calls of the functions of `parallel_state`, on two ranks with CPU tensors, and check what they did.

Each case serves two modules with these functions: ours, and SGLang's own, which creates our groups by the plugin.
"""

import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

# The dimensions whose group has all ranks, and those whose group has this rank alone.
WIDE = ("world", "tp", "dcp", "attn_tp", "moe_tp", "shared_experts_tp")
NARROW = ("attn_cp", "moe_dp", "moe_ep", "pp", "self_pp")

GROUPS = {
    **{f"get_{name}_group": name for name in (*WIDE, *NARROW)},
    "get_dcp_group_no_assert": "dcp",
    "get_tensor_model_parallel_group": "tp",
    "get_pipeline_model_parallel_group": "pp",
}
SIZES = {
    "get_world_size": "world",
    "get_tensor_model_parallel_world_size": "tp",
    "get_dcp_world_size": "dcp",
    "get_attn_tensor_model_parallel_world_size": "attn_tp",
    "get_attn_context_model_parallel_world_size": "attn_cp",
    "get_pipeline_model_parallel_world_size": "pp",
    "get_moe_data_parallel_world_size": "moe_dp",
    "get_moe_expert_parallel_world_size": "moe_ep",
    "get_moe_tensor_parallel_world_size": "moe_tp",
}
RANKS = {
    "get_world_rank": "world",
    **{name.replace("_world_size", "_rank"): group for name, group in SIZES.items() if group != "world"},
}


@dataclasses.dataclass
class Place:
    """Where a call is made.

    Attributes:
        state: The module that has the functions.
        rank: This rank.
        size: Number of ranks.
        given: Names of the arguments that the site passes.
        start: Opens torch.distributed and creates the world group. SGLang's getter also needs this again after
            `destroy_model_parallel`.
        divide: Creates the groups of every dimension, by the module's own function.
        method: Returns what to pass as `distributed_init_method`; new for each call.
        stack: Is closed after the call and its check.
    """

    state: Any
    rank: int
    size: int
    given: set[str]
    start: Callable[[], None]
    divide: Callable[[], None]
    method: Callable[[], str]
    stack: ExitStack

    def ranks(self, name: str) -> list[int]:
        """Return the ranks that the group of a dimension must have."""
        return list(range(self.size)) if name in WIDE else [self.rank]

    def restart(self) -> None:
        """Create the world and all groups again."""
        self.start()
        self.divide()

    def end(self) -> None:
        """Destroy all groups and the world."""
        self.state.destroy_model_parallel()
        self.state.destroy_distributed_environment()


Case = tuple[dict[str, Any], Callable[[Any], None]]


def same(found: Any, wanted: Any) -> None:
    """Raise if two values differ."""
    if found != wanted:
        raise AssertionError(f"the result is {found!r}, not {wanted!r}")


def sums(group: Any, ranks: list[int], rank: int) -> None:
    """Check that a group has these ranks, and that its sum is that over them."""
    same(list(group.ranks), ranks)
    same((group.world_size, group.rank_in_group), (len(ranks), ranks.index(rank)))
    same(group.all_reduce(torch.full((3,), rank + 1.0)).tolist(), [sum(each + 1.0 for each in ranks)] * 3)


def sums_by_torch(group: dist.ProcessGroup, size: int) -> None:
    """Check that a process group of torch has all ranks."""
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    same(total.item(), size)


def _group(place: Place, name: str) -> Case:
    return {}, lambda result: sums(result, place.ranks(name), place.rank)


def _create(place: Place, **arguments: Any) -> Case:
    """The new group has the ranks, adds up, and goes."""

    def check(result: Any) -> None:
        sums(result, place.ranks("world"), place.rank)
        same(result.unique_name.split(":")[0], "new")
        result.destroy()

    every = place.ranks("world")
    common = {"local_rank": place.rank, "backend": "gloo", "torch_distributed_backend": "gloo"}
    names = {"ranks": every, "group_ranks": [every], "group_name": "new"}
    flags = {name: False for name in place.given if name.startswith("use_") or name == "recovered_rank"}
    return {**common, **names, **flags, "rank_offset": 0, "max_world_size": None, **arguments}, check


def _world(place: Place) -> Case:
    arguments, _ = _create(place)

    def check(result: Any) -> None:
        sums(result, place.ranks("world"), place.rank)
        result.destroy()

    return arguments, check


def _environment(place: Place) -> Case:
    place.end()

    def check(result: Any) -> None:
        same(result, None)
        sums(place.state.get_world_group(), place.ranks("world"), place.rank)
        place.divide()

    arguments = {
        "world_size": place.size,
        "rank": place.rank,
        "distributed_init_method": place.method(),
        "local_rank": place.rank,
        "backend": "gloo",
        "timeout": 60,
        "moe_a2a_backend": "none",
        "recovered_rank": False,
        "max_world_size": None,
    }
    return arguments, check


def _every_group(place: Place) -> None:
    same(place.state.model_parallel_is_initialized(), True)
    for getter, name in GROUPS.items():
        sums(getattr(place.state, getter)(), place.ranks(name), place.rank)


def _model(place: Place) -> Case:
    place.state.destroy_model_parallel()
    same(place.state.model_parallel_is_initialized(), False)
    place.start()
    arguments = {
        "duplicate_tp_group": True,
        "enable_symm_mem": False,
        "recovered_rank": False,
        "rank_offset": 0,
        "max_world_size": None,
    }

    def check(result: Any) -> None:
        same(result, None)
        _every_group(place)
        place.state.destroy_model_parallel()
        place.restart()

    return arguments, check


def _destroy_model(place: Place) -> Case:
    def check(result: Any) -> None:
        same(place.state.model_parallel_is_initialized(), False)
        place.restart()
        _every_group(place)

    return {}, check


def _destroy_environment(place: Place) -> Case:
    place.state.destroy_model_parallel()

    def check(result: Any) -> None:
        same(dist.is_initialized(), False)
        place.restart()

    return {}, check


def _abort(place: Place) -> Case:
    def check(result: Any) -> None:
        same(dist.is_initialized(), False)
        place.end()
        place.restart()

    return {}, check


def _custom(place: Place) -> Case:
    arguments = {"group_ranks": place.ranks("world"), "backend": "gloo"}
    return arguments, lambda result: sums_by_torch(result, place.size)


def _scope(inside: Callable[[], None], arguments: dict[str, Any], after: Callable[[], None]) -> Case:
    def check(result: AbstractContextManager[Any]) -> None:
        with result:
            inside()
        after()

    return arguments, check


def _capture(place: Place) -> Case:
    def check(result: AbstractContextManager[Any]) -> None:
        with result as context:
            same(context.stream, None)
            _every_group(place)

    return {"stream": None}, check


def _prefill(place: Place) -> Case:
    before = place.state.get_tp_group()

    def inside() -> None:
        sums(place.state.get_tp_group(), place.ranks("tp"), place.rank)
        same(place.state.get_tp_group() is before, False)

    return _scope(inside, {}, lambda: same(place.state.get_tp_group() is before, True))


def _patch_tensor(place: Place) -> Case:
    before, draft = place.state.get_tp_group(), place.state.get_self_pp_group()

    def inside() -> None:
        for getter in ("get_tp_group", "get_attn_tp_group"):
            sums(getattr(place.state, getter)(), [place.rank], place.rank)

    def after() -> None:
        same(place.state.get_tp_group() is before, True)
        _every_group(place)

    return _scope(inside, {"tp_group": draft, "owns_attention": True}, after)


def _patch_pipeline(place: Place) -> Case:
    before, draft = place.state.get_pp_group(), place.state.get_tp_group()
    return _scope(
        lambda: same(place.state.get_pp_group() is draft, True),
        {"pp_group": draft},
        lambda: same(place.state.get_pp_group() is before, True),
    )


VLLM_GETTERS = ("get_pp_group", "get_tp_group", "get_world_group")


@functools.cache
def vllm_modules() -> dict[str, Any]:
    """Return modules with vLLM's names, in which the getters of `parallel_state` return their names."""
    names = ("vllm", "vllm.distributed", "vllm.distributed.parallel_state")
    modules: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    top, middle, state = modules.values()
    top.__path__ = middle.__path__ = []
    top.distributed, middle.parallel_state = middle, state
    for name in VLLM_GETTERS:
        setattr(state, name, lambda name=name: name)
    return modules


@contextmanager
def stand_in_for_vllm() -> Iterator[Any]:
    """Put the stand-in in vLLM's place. It is the same one each time, as SGLang notes its getters only once."""
    before = {name: sys.modules.get(name) for name in vllm_modules()}
    sys.modules.update(vllm_modules())
    try:
        yield vllm_modules()["vllm.distributed.parallel_state"]
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _vllm(place: Place) -> Case:
    """The getters of vLLM return SGLang's groups, until they are put back."""
    vllm = place.stack.enter_context(stand_in_for_vllm())
    patch = place.state.monkey_patch_vllm_parallel_state
    place.stack.callback(patch, reverse=True)
    if "reverse" in place.given:
        patch()

    def check(result: Any) -> None:
        for name in VLLM_GETTERS:
            wanted = name if "reverse" in place.given else getattr(place.state, name)()
            same(getattr(vllm, name)() is wanted, True)

    return {"reverse": True}, check


def _same_node(place: Place) -> Case:
    arguments = {"pg": place.state.get_tp_group().cpu_group, "source_rank": 0}
    return arguments, lambda result: same(result, [True] * place.size)


def _flag(attribute: str, setter: str, value: bool) -> Callable[[Place], Case]:
    """A flag of SGLang's is kept as an attribute of the groups that are created afterwards."""

    def case(place: Place) -> Case:
        place.stack.callback(getattr(place.state, setter), not value)

        def check(result: Any) -> None:
            every = [place.ranks("world")]
            group = place.state.init_model_parallel_group(every, place.rank, "gloo", group_name="new")
            same((result, getattr(group, attribute)), (None, value))
            sums(group, every[0], place.rank)
            group.destroy()

        return {"enable": value}, check

    return case


def _tag(place: Place) -> Case:
    """With the flag, SGLang's hint is put on the groups, whose sums stay right."""
    group = place.state.get_attn_tp_group()
    group._fi_workspace_hint = None
    place.stack.callback(place.state.set_flashinfer_allreduce_only, False)
    sets = "enable" in place.given
    if not sets:
        place.state.set_flashinfer_allreduce_only(True)

    def check(result: Any) -> None:
        if sets:
            place.state._tag_groups_for_flashinfer_allreduce_only()
        same((result, group._fi_workspace_hint), (None, "attn_tp"))
        _every_group(place)

    return {"enable": True}, check


def _work(place: Place) -> Case:
    tensor, received = torch.full((3,), float(place.rank)), torch.zeros(3)
    group, peer = place.state.get_tp_group().cpu_group, 1 - place.rank
    work = dist.isend(tensor, peer, group=group)

    def check(result: Any) -> None:
        dist.recv(received, peer, group=group)
        result.work.wait()
        same(received.tolist(), [float(peer)] * 3)
        same(result.payload is tensor, True)

    return {"work": work, "payload": tensor}, check


def _answers(wanted: Any, **arguments: Any) -> Callable[[Place], Case]:
    return lambda place: (arguments, lambda result: same(result, wanted))


def _size(place: Place, name: str) -> Case:
    return {}, lambda result: same(result, len(place.ranks(name)))


def _rank(place: Place, name: str) -> Case:
    return {}, lambda result: same(result, place.ranks(name).index(place.rank))


FUNCTIONS: dict[str, Callable[[Place], Case]] = {
    **{getter: functools.partial(_group, name=name) for getter, name in GROUPS.items()},
    **{getter: functools.partial(_size, name=name) for getter, name in SIZES.items()},
    **{getter: functools.partial(_rank, name=name) for getter, name in RANKS.items()},
    "GroupCoordinator": _create,
    "P2PWork": _work,
    "_tag_groups_for_flashinfer_allreduce_only": _tag,
    "abort_distributed_environment": _abort,
    "create_custom_parallel_group": _custom,
    "destroy_distributed_environment": _destroy_environment,
    "destroy_model_parallel": _destroy_model,
    "get_default_distributed_backend": _answers("gloo", device="cpu"),
    "get_mooncake_transfer_engine": _answers(None),
    "get_torch_distributed_pg_options": _answers(None),
    "graph_capture": _capture,
    "in_the_same_node_as": _same_node,
    "init_distributed_environment": _environment,
    "init_model_parallel_group": _create,
    "init_world_group": _world,
    "initialize_model_parallel": _model,
    "model_parallel_is_initialized": _answers(True),
    "patch_pipeline_parallel_group": _patch_pipeline,
    "patch_tensor_parallel_group": _patch_tensor,
    "pdmux_prefill_tp_group": _prefill,
    "monkey_patch_vllm_parallel_state": _vllm,
    "set_custom_all_reduce": _flag("use_custom_allreduce", "set_custom_all_reduce", False),
    "set_flashinfer_allreduce_only": _tag,
    "set_mscclpp": _flag("use_mscclpp", "set_mscclpp", True),
    "set_torch_symm_mem_all_reduce": _flag(
        "use_torch_symm_mem_all_reduce", "set_torch_symm_mem_all_reduce", True
    ),
}
