"""Groups inside of an engine's models, with hooks of layers, graph captures and subclasses."""

from pathlib import Path
from typing import Any

import torch

from coordinator import GraphCaptureContext, GroupCoordinator, get_tp_group, graph_capture
from tests.engines import Layer, engine, refusal
from tests.harness import RankPool


class Counting(GroupCoordinator):
    """A subclass of the group, as an engine defines it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reductions = 0

    def all_reduce(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.reductions += 1
        return super().all_reduce(input_, *args, **kwargs)


def around_models(rank: int, world_size: int, directory: Path) -> None:
    with engine(rank, world_size, directory, tp=2):
        tp = get_tp_group()
        first, last = Layer(), Layer()
        tp.prepare_communication_buffer_for_model(torch.nn.Sequential(first, torch.nn.Linear(2, 2), last))
        assert first.prepared_for is last.prepared_for is tp
        assert "torch.nn.Module" in refusal(lambda: tp.prepare_communication_buffer_for_model(1))  # type: ignore[arg-type]
        given = GraphCaptureContext()
        with tp.graph_capture() as context, tp.graph_capture(given) as same:
            assert isinstance(context, GraphCaptureContext)
            assert same is given
            assert tp.all_reduce(torch.ones(1)).item() == 2
        with graph_capture(device=torch.device("cpu")) as context:
            assert hasattr(context, "stream")
            assert get_tp_group().all_reduce(torch.ones(1)).item() == 2
        with Counting([[0, 1]], rank, "gloo", True, group_name="mine") as group:
            assert group.all_reduce(torch.ones(1)).item() == 2
            assert group._all_reduce_out_place(torch.ones(1)).item() == 2
            assert group._all_gather_out_place(torch.tensor([[rank]]), 0).flatten().tolist() == [0, 1]
            assert group._reduce_scatter_out_place(torch.ones(2), 0).tolist() == [2]
            assert group.reductions == 1, "what is behind the methods does not call them"


def test_models_captures_and_subclasses_work(ranks2: RankPool) -> None:
    """Hooks of layers, the capture contexts of a group and of the module, and an overridden method are used."""
    ranks2.run(around_models)
