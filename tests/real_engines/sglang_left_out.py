"""Why a call that has the name of a method of a group, or of a function of `parallel_state`, is not one.

Each receiver here was looked up in SGLang's source. A receiver that is not here is unknown: somebody has to look
whether it is a group, which `sglang_sites` must then find.
"""

import ast
import dataclasses
from collections import Counter
from collections.abc import Sequence

from tests.real_engines.sglang_sites import Site


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why some receivers are no group.

    Attributes:
        text: The reason.
        receivers: Their forms; a function has its name and "()".
        paths: Where that holds, as beginnings of files in `sglang/srt`: elsewhere such a name means something else.
        method: The only method for which it holds; "" for all.
    """

    text: str
    receivers: tuple[str, ...]
    paths: tuple[str, ...] = ("",)
    method: str = ""


@dataclasses.dataclass(frozen=True)
class Row:
    """One reason with what it covers: the number of calls of each receiver."""

    text: str
    counts: Counter[str]


def form(site: Site) -> str:
    """Return the receiver without what stands in its brackets: `history.to(…)[…]`."""
    if not site.receiver:
        return f"{site.name}()"
    return ast.unparse(_Shorten().visit(ast.parse(site.receiver, mode="eval"))).replace("...", "…")


class _Shorten(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.Call:
        arguments: list[ast.expr] = [ast.Constant(...)] if node.args or node.keywords else []
        return ast.Call(self.visit(node.func), arguments, [])

    def visit_Subscript(self, node: ast.Subscript) -> ast.Subscript:
        return ast.Subscript(self.visit(node.value), ast.Constant(...), ast.Load())


def reason(site: Site) -> str:
    """Return why a call is none of a group; "" if nobody has looked."""
    path, what = site.path.removeprefix("sglang/srt/"), form(site)
    found = (
        each.text
        for each in REASONS
        if what in each.receivers and path.startswith(each.paths) and each.method in ("", site.name)
    )
    return next(found, "")


def unknown(sites: Sequence[Site]) -> list[str]:
    """Return the calls without a reason, as `file:line receiver.form`."""
    return [f"{site.path}:{site.line} {site.receiver}.{site.form}" for site in sites if not reason(site)]


def rows(sites: Sequence[Site]) -> list[Row]:
    """Return what each reason covers, in the order of `REASONS`."""
    counts: dict[str, Counter[str]] = {each.text: Counter() for each in REASONS}
    for site in sites:
        counts.setdefault(reason(site) or "unknown", Counter())[form(site)] += 1
    return [Row(text, each) for text, each in counts.items() if each]


_COMMUNICATOR = "a communicator behind SGLang's own group, which our group does not have"
_TENSOR = "`gather` of a tensor"
_SYMMETRIC = "symmetric memory, or a kernel that uses it"
_POOL = "an owner of memory: `destroy` frees it, `gather` reads rows of it"
_SOCKET = "a socket, a pipe or a context of ZeroMQ"
_ENCODER = "a part of the encoder's server, which sends requests and results"
_OWN = "an object of SGLang's that moves data by means of its own, over a process group of torch or files"

REASONS = (
    Reason("a function of torch", ("torch.distributed", "dist", "torch")),
    Reason("Python's `asyncio.gather`", ("asyncio",)),
    Reason("a function of Megatron", ("self._mpu",)),
    Reason(
        _TENSOR,
        (
            *(
                "candidate_ids",
                "candidate_tokens",
                "context",
                "contexts",
                "conv_input",
                "d.slots",
                "final_ids",
            ),
            *("flat_ids", "full", "gathered[…]", "gathered_logprobs", "gating_prob", "history.to(…)[…]"),
            *(
                "indices.argsort(…)",
                "logical_count",
                "logical_count.view(…)",
                "logits",
                "maps[…]",
                "masked_gates",
            ),
            *(
                "masked_gates_top2",
                "mlog2log",
                "mlog2phy",
                "mlog_count",
                "mlogcnt.view(…)",
            ),
            *(
                "non_masked_page_table",
                "phy2mlog",
                "phyrank",
                "physical_to_logical_map",
                "probs",
                "result",
                "rows",
            ),
            *(
                "routed_logits",
                "routed_scores",
                "score1",
                "scores",
                "self.req_to_token[…]",
                "self.token_ids[…]",
            ),
            *(
                "self.req_to_token_pool.req_to_token[…]",
                "target_probs",
                "target_top1",
                "tensor",
                "weight",
                "window",
            ),
            *(
                "tokens_per_expert",
                "tokens_per_expert.sum(…)",
                "tokens_per_mlog / mlogcnt",
                "transition_probs",
                "x",
            ),
            "top_tokens.reshape(…)",
        ),
        method="gather",
    ),
    Reason(_COMMUNICATOR, ("group.pynccl_comm", "pynccl_comm", "self.kv_gather_comm")),
    Reason(
        _COMMUNICATOR,
        ("comm",),
        ("layers/attention/minimax_sparse_ops/indexer_cp.py", "mem_cache/dsa_cache_layer_split.py"),
    ),
    Reason(_COMMUNICATOR, ("self",), ("distributed/device_communicators/pynccl.py",)),
    Reason(
        _COMMUNICATOR,
        ("_custom_ar", "module", "ops", "self._ipc_manager", "self._workspace"),
        ("distributed/device_communicators/",),
    ),
    Reason(_SYMMETRIC, ("self.handle", "ws.handle", "sp_collective"), ("layers/communication/",)),
    Reason(_SYMMETRIC, ("hflags", "k3_ar_fusion"), ("models/",)),
    Reason("a communicator of MORI", ("comm",), ("layers/moe/token_dispatcher/moriep.py",)),
    Reason(
        _POOL,
        (
            *(
                "capturer",
                "entry.host_pool",
                "host_pool",
                "self.decode_host_mem_pool",
                "self.hisparse_coordinator",
            ),
            *("self.host_cache", "self.host_pool_group", "self.mem_pool_host", "self.workspace", "temporary"),
        ),
        method="destroy",
    ),
    Reason(_POOL, ("super()",), ("mem_cache/pool_host/",), "destroy"),
    Reason(_POOL, ("cls",), ("layers/moe/token_dispatcher/deepep_v2.py",), "destroy"),
    Reason(_POOL, ("self.store",), ("layers/moe/paged_experts/executor.py",), "gather"),
    Reason(_POOL, ("offloaded_embedding",), ("models/qwen4_exp.py",), "gather"),
    Reason(
        _SOCKET,
        (
            *("pipe", "pipe_writer", "reader", "scheduler_pipe_readers[…]", "self._socket", "self._zmq_ctx"),
            *("self.local_socket", "self.remote_socket", "sock", "socket"),
        ),
    ),
    Reason(_SOCKET, ("ctx",), ("disaggregation/encoder/runtime.py",), "destroy"),
    Reason(_ENCODER, ("dp_dispatcher", "enc", "self.delivery", "self.encoder"), ("disaggregation/encoder/",)),
    Reason("a sender of the key-value cache", ("sender", "super()"), ("disaggregation/",), "send"),
    Reason(
        _OWN,
        (
            *("get_naive_distributed()", "mlp_sync_info", "self._sync_ctx", "self.broadcaster"),
            "self.mla_broadcaster",
        ),
    ),
    Reason(_OWN, ("self",), ("distributed/naive_distributed.py",)),
    Reason("a method of the same class", ("self",), ("models/qwen4_exp.py",), "gather"),
    Reason(
        "a method of the same class", ("cls",), ("layers/moe/token_dispatcher/pplx.py",), "_register_group"
    ),
)
