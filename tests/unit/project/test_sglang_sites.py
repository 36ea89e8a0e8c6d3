"""The search for SGLang's call sites finds every form in which its modules use a group, and drops none in silence."""

from pathlib import Path

import pytest

from tests.real_engines import sglang_left_out, sglang_sites

STATE = """
class GroupCoordinator:
    def __init__(self, group_ranks, local_rank): self.all_reduce(group_ranks)
    def all_reduce(self, input_): self.all_reduce(input_)
    def destroy(self): pass
    @property
    def is_first_rank(self): pass

class P2PWork:
    work: int
    payload: int

def get_tp_group(): return _TP
def graph_capture(stream=None): return get_tp_group().all_reduce(_private(1))
def _private(x): pass
def _shared(x): return _TP.destroy()
get_tensor_model_parallel_group = get_tp_group
"""
FORMS = [
    ("from sglang.srt.distributed.parallel_state import get_tp_group as g\ng()", "get_tp_group()"),
    ("from sglang.srt.distributed import graph_capture\ngraph_capture(stream=s)", "graph_capture(stream=)"),
    ("from sglang.srt.distributed import *\ngraph_capture(s)", "graph_capture(_)"),
    ("from .distributed.parallel_state import P2PWork\nP2PWork(work, 1)", "P2PWork(_, _)"),
    ("from sglang.srt.distributed import parallel_state as ps\nps.graph_capture()", "graph_capture()"),
    ("import sglang.srt.distributed as d\nd.get_tp_group()", "get_tp_group()"),
    ("from sglang.srt.distributed.parallel_state import _shared\n_shared(1)", "_shared(_)"),
    ("get_parallel().attn_tp_group.all_reduce(x)", "all_reduce(_)"),
    ("later = self.tp_group.all_reduce", "all_reduce"),
]


def scan(wheel: Path, source: str) -> sglang_sites.Scan:
    state = wheel / sglang_sites.STATE
    state.parent.mkdir(parents=True)
    state.write_text(STATE)
    (wheel / "sglang" / "srt" / "user.py").write_text(source)
    return sglang_sites.scan(wheel)


@pytest.mark.parametrize(("source", "form"), FORMS)
def test_every_form_of_a_use_is_a_site(tmp_path: Path, source: str, form: str) -> None:
    """A function by any import, a method on a group, and one that is passed on are found."""
    found = scan(tmp_path, source)
    assert [each.form for each in found.sites if each.path.endswith("user.py")] == [form]
    assert found.left_out == []


def test_the_functions_beside_the_group_are_searched(tmp_path: Path) -> None:
    """Calls in the class and of private functions are its own affair; the others of `parallel_state` count."""
    found = scan(tmp_path, "group.is_first_rank")
    calls = [f"{each.receiver}.{each.form}".lstrip(".") for each in found.sites]
    assert calls == ["get_tp_group().all_reduce(_)", "get_tp_group()", "_TP.destroy()"]


def test_an_unknown_receiver_is_reported(tmp_path: Path) -> None:
    """A call on something that nobody has looked at is no site, and is named; a known receiver has its reason."""
    found = scan(tmp_path, "novel.all_reduce(x)\ndist.all_reduce(x)\ncomm.destroy()\nget_tp_group()")
    assert [each for each in found.sites if each.path.endswith("user.py")] == []
    assert sglang_left_out.unknown(found.left_out) == [
        "sglang/srt/user.py:1 novel.all_reduce(_)",
        "sglang/srt/user.py:3 comm.destroy()",
        "sglang/srt/user.py:4 .get_tp_group()",
    ]
    assert [(row.text, dict(row.counts)) for row in sglang_left_out.rows(found.left_out)] == [
        ("a function of torch", {"dist": 1}),
        ("unknown", {"novel": 1, "comm": 1, "get_tp_group()": 1}),
    ]


def test_a_receiver_is_shown_without_its_arguments(tmp_path: Path) -> None:
    """What stands in brackets does not tell two receivers apart."""
    (site,) = scan(tmp_path, "a.b(c, d=1).e[f].destroy()").left_out
    assert sglang_left_out.form(site) == "a.b(…).e[…]"
