"""Steps of a stress life in which every rank makes the same collective."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from coordinator import DisagreementError, GroupCoordinator, ReduceOperation, UsageError, functional
from tests.stress.model import MismatchError, Model, check_same, combined, joined

__all__ = ["MAKERS", "STEPS", "Check", "Start", "dict_of", "torch_calls"]

Check = Callable[[Any], None]
Start = Callable[..., Any]


def _operation(model: Model, dtype: torch.dtype) -> ReduceOperation:
    every = [each for each in ReduceOperation if dtype.is_floating_point or each is not ReduceOperation.MEAN]
    return model.plan.choice(every)


def _sizes(model: Model) -> list[int]:
    return [model.plan.choice((0, 1, 5, 700)) for _ in range(model.world_size)]


def reduction(group: GroupCoordinator, model: Model) -> tuple[Start, Check]:
    """Reduce to all ranks, out of place, in place or into an output, or to one."""
    me, n = group.rank_in_group, model.world_size
    dtype, form = model.dtype(summed=True), model.plan.choice(("out", "in place", "output", "root"))
    root, operation, shape = model.rank(), _operation(model, dtype), (model.count(),)
    inputs = [model.tensor(shape, dtype, rank) for rank in range(n)]
    expected, given = model.reduced(operation, inputs), inputs[me].clone()
    output = torch.empty(shape, dtype=dtype)
    start: Start = {
        "out": lambda **o: group.all_reduce(given, operation, **o),
        "in place": lambda **o: group.all_reduce_(given, operation, **o),
        "output": lambda **o: group.all_reduce(given, operation, out=output, **o),
        "root": lambda **o: group.reduce(given, root, operation, **o),
    }[form]

    def check(found: Any) -> None:
        if form == "root" and me != root:
            check_same(found, None, "result of reduce")
        else:
            check_same(found, expected, f"{operation.value}, {form}")
        if form != "in place":
            check_same(given, inputs[me], "the input afterwards")
        if form == "output":
            check_same(output, expected, "the output")

    return start, check


def scattering(group: GroupCoordinator, model: Model) -> tuple[Start, Check]:
    """Reduce and scatter, in equal or other parts."""
    me, n = group.rank_in_group, model.world_size
    dtype, uneven = model.dtype(summed=True), model.plan.random() < 0.5
    operation, sizes = _operation(model, dtype), _sizes(model)
    if not uneven:
        sizes = [model.count(200_000)] * n
    inputs = [model.tensor((sum(sizes), 2), dtype, rank) for rank in range(n)]
    expected = model.reduced(operation, inputs).split(sizes)[me]
    if uneven:
        return lambda **o: group.reduce_scatterv(inputs[me], 0, sizes, operation, **o), _expecting(expected)
    return lambda **o: group.reduce_scatter(inputs[me], 0, operation, **o), _expecting(expected)


def gathering(group: GroupCoordinator, model: Model) -> tuple[Start, Check]:
    """Gather to all or to one, along either dimension, in equal or other parts."""
    me, n = group.rank_in_group, model.world_size
    dtype, form, dim = model.dtype(), model.plan.choice(("all", "uneven", "root")), model.plan.randrange(2)
    root, sizes = model.rank(), _sizes(model)
    if form != "uneven":
        sizes = [model.count(100_000)] * n
    else:
        dim = 0
    inputs = [
        model.tensor((sizes[rank], 3) if dim == 0 else (3, sizes[rank]), dtype, rank) for rank in range(n)
    ]
    expected = joined(inputs, dim)
    if form == "all":
        return lambda **o: group.all_gather(inputs[me], dim, **o), _expecting(expected)
    if form == "uneven":
        return lambda **o: group.all_gatherv(inputs[me], 0, sizes, **o), _expecting(expected)
    return lambda **o: group.gather(inputs[me], root, dim, **o), _expecting(expected if me == root else None)


def spreading(group: GroupCoordinator, model: Model) -> tuple[Start, Check]:
    """Broadcast or scatter from one rank."""
    me, n = group.rank_in_group, model.world_size
    dtype, root, form, rows = model.dtype(), model.rank(), model.plan.randrange(2), model.count(100_000)
    if form == 0:
        expected = model.tensor((rows, 3), dtype, "root")
        given = expected.clone() if me == root else model.tensor((rows, 3), dtype, me)
        return lambda **o: group.broadcast(given, root, **o), _expecting(expected)
    whole = model.tensor((rows * n, 2), dtype, "root")
    output = torch.empty((rows, 2), dtype=dtype)
    return (
        lambda **o: group.scatter(output, whole if me == root else None, root, **o),
        _expecting(whole[me * rows : (me + 1) * rows]),
    )


def exchange(group: GroupCoordinator, model: Model) -> tuple[Start, Check]:
    """Send each rank a part of its own size."""
    me, n, dtype = group.rank_in_group, model.world_size, model.dtype()
    sizes = [[model.plan.choice((0, 1, 30, 5000)) for _ in range(n)] for _ in range(n)]
    inputs = [model.tensor((sum(sizes[rank]), 2), dtype, rank) for rank in range(n)]
    expected = joined([each.split(sizes[rank])[me] for rank, each in enumerate(inputs)])
    received = [sizes[rank][me] for rank in range(n)]
    return (
        lambda **o: group.all_to_all(inputs[me], 0, sizes[me], received, **o),
        _expecting(expected),
    )


def into_output(group: GroupCoordinator, model: Model) -> tuple[Start, Check]:
    """Gather, reduce and scatter, or exchange into a tensor of the caller, which may be a part of the larger one."""
    me, n, plan = group.rank_in_group, model.world_size, model.plan
    form, rows, shares = (
        plan.choice(("gather", "scatter", "exchange")),
        model.count(60_000),
        plan.random() < 0.3,
    )
    dtype = model.dtype(summed=form == "scatter")
    if form == "exchange":
        return _exchange_into_output(group, model, dtype, rows)
    part, whole = (rows, 3), plan.choice(((n * rows, 3), (n, rows, 3), (n * rows * 3,)))
    if form == "gather":
        inputs = [model.tensor(part, dtype, rank) for rank in range(n)]
        expected, output = joined(inputs).view(whole), torch.empty(whole, dtype=dtype)
        given = output.view(n, -1)[me].view(part).copy_(inputs[me]) if shares else inputs[me]
        start: Start = lambda **o: group.all_gather_into_tensor(output, given, **o)  # noqa: E731
    else:
        operation = _operation(model, dtype)
        inputs = [model.tensor(whole, dtype, rank) for rank in range(n)]
        expected, given = model.reduced(operation, inputs).view(n, *part)[me], inputs[me].clone()
        output = given.view(n, *part)[me] if shares else torch.empty(part, dtype=dtype)
        start = lambda **o: group.reduce_scatter_tensor(output, given, operation, **o)  # noqa: E731

    def check(found: Any) -> None:
        check_same(found, expected, f"{form} into an output")
        check_same(output, expected, f"the output of {form}")
        if not shares:
            check_same(given, inputs[me], f"the input of {form} afterwards")

    return start, check


def _exchange_into_output(
    group: GroupCoordinator, model: Model, dtype: torch.dtype, rows: int
) -> tuple[Start, Check]:
    me, n = group.rank_in_group, model.world_size
    is_even = model.plan.random() < 0.5
    sizes = [[rows if is_even else model.plan.choice((0, 1, 30, 5000)) for _ in range(n)] for _ in range(n)]
    inputs = [model.tensor((sum(sizes[rank]), 2), dtype, rank) for rank in range(n)]
    expected = joined([each.split(sizes[rank])[me] for rank, each in enumerate(inputs)])
    output, stated = torch.empty_like(expected), () if is_even else ([each[me] for each in sizes], sizes[me])

    def check(found: Any) -> None:
        check_same(found, expected, "all_to_all_single")
        check_same(output, expected, "the output of all_to_all_single")

    return lambda **o: group.all_to_all_single(output, inputs[me], *stated, **o), check


def _expecting(expected: Any) -> Check:
    return lambda found: check_same(found, expected, "the result")


MAKERS = (reduction, reduction, scattering, gathering, spreading, exchange, into_output)


def tensors(group: GroupCoordinator, model: Model) -> None:
    """Make one collective of tensors."""
    start, check = model.plan.choice(MAKERS)(group, model)
    check(start())


def asynchronous(group: GroupCoordinator, model: Model) -> None:
    """Start several collectives, send a message meanwhile, and wait in an order of this rank's own."""
    started = []
    for number in range(model.plan.randrange(1, 5)):
        inner = model.inner(f"call {number}")
        start, check = model.plan.choice(MAKERS)(group, inner)
        started.append((start(async_op=True), check))
    sender, receiver = model.rank(), model.rank()
    if sender != receiver and group.rank_in_group == sender:
        group.send_object(model.object("meanwhile"), receiver)
    elif sender != receiver and group.rank_in_group == receiver:
        check_same(group.recv_object(sender), model.object("meanwhile"), "the object sent meanwhile")
    barrier = group.barrier(async_op=True)
    model.private(group.rank_in_group).shuffle(started)
    for handle, check in started:
        check(handle.wait())
    if barrier is not None:
        barrier.wait()


def coalesced(group: GroupCoordinator, model: Model) -> None:
    """Reduce and gather several tensors in one call."""
    me, n = group.rank_in_group, model.world_size
    kinds = [(model.dtype(summed=True), model.count(5000)) for _ in range(model.plan.randrange(1, 6))]
    given = [
        [model.tensor((n * count,), dtype, rank, at) for at, (dtype, count) in enumerate(kinds)]
        for rank in range(n)
    ]
    sums = [model.reduced(ReduceOperation.SUM, [each[at] for each in given]) for at in range(len(kinds))]
    check_same(group.all_reduce_coalesced([each.clone() for each in given[me]]), sums, "all_reduce_coalesced")
    wholes = [torch.cat([each[at] for each in given]) for at in range(len(kinds))]
    check_same(group.all_gather_coalesced(given[me]), wholes, "all_gather_coalesced")
    parts = [each.chunk(n)[me] if len(each) else each for each in sums]
    check_same(group.reduce_scatter_coalesced(given[me]), parts, "reduce_scatter_coalesced")


def functionals(group: GroupCoordinator, model: Model) -> None:
    """Make functional collectives, some of which run until their results are used in an order of this rank's own."""
    used: list[Callable[[], None]] = []
    for number in range(model.plan.randrange(1, 4)):
        inner = model.inner(f"call {number}")
        used.append(_functional(group, inner))
    model.private(group.rank_in_group).shuffle(used)
    for use in used:
        use()


def _functional(group: GroupCoordinator, model: Model) -> Callable[[], None]:
    me, n, plan, root = group.rank_in_group, model.world_size, model.plan, model.rank()
    dtype, rows = model.dtype(summed=True), model.count(100_000)
    inputs = [model.tensor((n * rows, 2), dtype, rank) for rank in range(n)]
    operation, given = _operation(model, dtype), inputs[me].clone()
    # Whether a call runs beside the rank may differ between ranks.
    overlap, where = model.private(me).choice((None, True, False)), plan.choice((group, group.unique_name))
    match plan.randrange(5):
        case 0:
            found = functional.all_reduce(given, operation, where, overlap=overlap)
            expected = model.reduced(operation, inputs)
        case 1:
            found = functional.all_gather_tensor(given, 1, where, overlap=overlap)
            expected = joined(inputs, 1)
        case 2:
            found = functional.reduce_scatter_tensor(given, operation, 0, where, overlap=overlap)
            expected = model.reduced(operation, inputs).view(n, rows, 2)[me]
        case 3:
            found = functional.all_to_all_single(given, None, None, where, overlap=overlap)
            expected = joined([each.view(n, rows, 2)[me] for each in inputs])
        case _:
            found = functional.broadcast(given, root, where, overlap=overlap)
            expected = inputs[root]

    def use() -> None:
        check_same(functional.wait_tensor(found), expected, "a functional collective")
        check_same(given, inputs[me], "the input of a functional collective afterwards")

    return use


TORCH_SUMS = {
    ReduceOperation.SUM: dist.ReduceOp.SUM,
    ReduceOperation.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOperation.MIN: dist.ReduceOp.MIN,
    ReduceOperation.MAX: dist.ReduceOp.MAX,
}


def torch_calls(there: dist.ProcessGroup, model: Model) -> None:
    """Make collectives of torch.distributed over a group of our backend, and wait in an order of this rank's own."""
    started = [_torch_call(there, model.inner(f"call {at}")) for at in range(model.plan.randrange(1, 5))]
    if model.plan.random() < 0.3:
        # torch pickles objects, and cannot read all dtypes again.
        every = [
            model.private(rank).randbytes(model.plan.choice((0, 10, 5000)))
            for rank in range(model.world_size)
        ]
        found: list[Any] = [None] * model.world_size
        dist.all_gather_object(found, every[there.rank()], there)
        check_same(found, every, "dist.all_gather_object")
    model.private(there.rank()).shuffle(started)
    for work, output, expected, form in started:
        if work is not None:
            work.wait()
        if expected is not None:
            check_same(output, expected, f"dist.{form}")
    if model.plan.random() < 0.2:
        dist.barrier(there)


def _torch_call(
    there: dist.ProcessGroup, model: Model
) -> tuple[dist.Work | None, torch.Tensor, torch.Tensor | None, str]:
    """Start a call; return its handle, if it has one, its output, what that must be, and the name of the call."""
    me, n, plan = there.rank(), model.world_size, model.plan
    forms = ("all_reduce", "reduce", "scatter", "gather", "exchange", "broadcast", "batch")
    form = plan.choice(forms if n > 1 else forms[:-1])  # no rank sends to itself
    is_summed = form in ("all_reduce", "reduce", "scatter")
    dtype, rows, waits = model.dtype(summed=is_summed), model.count(60_000), plan.random() < 0.5
    inputs = [model.tensor((n * rows, 2), dtype, rank) for rank in range(n)]
    operation, root = plan.choice(list(TORCH_SUMS)), model.rank()
    mine, op, src = inputs[me].clone(), TORCH_SUMS[operation], dist.get_global_rank(there, root)
    part, total = torch.empty((rows, 2), dtype=dtype), None
    if is_summed:
        total = combined(operation, inputs)
    match form:
        case "all_reduce":
            return dist.all_reduce(mine, op, there, not waits), mine, total, form
        case "reduce":
            return dist.reduce(mine, src, op, there, not waits), mine, total if me == root else None, form
        case "scatter":
            assert total is not None
            work = dist.reduce_scatter(part, list(mine.view(n, rows, 2)), op, there, not waits)
            return work, part, total.view(n, rows, 2)[me], form
        case "gather":
            whole = torch.empty((n, n * rows, 2), dtype=dtype)
            work = dist.all_gather(list(whole), mine, there, not waits)
            return work, whole, joined(inputs).view(whole.shape), form
        case "exchange":
            output = torch.empty_like(mine)
            work = dist.all_to_all_single(output, mine, None, None, there, not waits)
            return work, output, joined([each.view(n, rows, 2)[me] for each in inputs]), form
        case "broadcast":
            return dist.broadcast(mine, src, there, not waits), mine, inputs[root], form
    # A ring: to the next rank, and from the one before.
    output, after, before = torch.empty_like(mine), (me + 1) % n, (me - 1) % n
    operations = [
        dist.P2POp(dist.isend, mine, group=there, group_peer=after),
        dist.P2POp(dist.irecv, output, group=there, group_peer=before),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return None, output, inputs[before], form


def objects(group: GroupCoordinator, model: Model) -> None:
    """Make one collective of objects."""
    me, n, root = group.rank_in_group, model.world_size, model.rank()
    mine, every = model.object(me), [model.object(rank) for rank in range(n)]
    match model.plan.randrange(6):
        case 0 | 1:
            found = group.broadcast_object(mine if me == root else None, root)
            check_same(found, every[root], "broadcast_object")
        case 2:
            check_same(group.all_gather_object(mine), every, "all_gather_object")
        case 3:
            check_same(group.gather_object(mine, root), every if me == root else None, "gather_object")
        case 4:
            given = [None] * 3 if me != root else [every[root], 1, "x"]
            check_same(
                group.broadcast_object_list(given, root), [every[root], 1, "x"], "broadcast_object_list"
            )
        case _:
            slot: list[Any] = [None]
            group.scatter_object_list(slot, every if me == root else None, root)
            check_same(slot[0], mine, "scatter_object_list")


def scalars(group: GroupCoordinator, model: Model) -> None:
    """Sum a number, share a flag, and meet."""
    values = [model.plan.randrange(-1000, 1000) / 8 for _ in range(model.world_size)]
    check_same(group.all_sum(values[group.rank_in_group]).item(), sum(values), "all_sum")
    root, flag = model.rank(), model.plan.random() < 0.5
    check_same(group.broadcast_flag(flag == (group.rank_in_group == root), root), flag, "broadcast_flag")
    model.plan.choice((group.barrier, group.monitored_barrier))()


def tensor_dict(group: GroupCoordinator, model: Model) -> None:
    """Broadcast a tensor dict."""
    root, expected = model.rank(), dict_of(model, "dict")
    found = group.broadcast_tensor_dict(expected if group.rank_in_group == root else None, root)
    check_same(found, expected, "broadcast_tensor_dict")


def dict_of(model: Model, *whose: object) -> dict[Any, Any]:
    """Return the tensor dict that `whose` names."""
    source = model.private(whose)
    found: dict[Any, Any] = {"object": model.object(*whose, "object")}
    for number in range(source.randrange(4)):
        shape = (source.choice((0, 1, 60, 20_000, 300_000)),)
        found[f"tensor {number}"] = model.tensor(shape, model.dtype_of(source), *whose, number)
    return found


def refused(group: GroupCoordinator, model: Model) -> None:
    """Make calls that every rank must refuse, and look whether the group goes on.

    Over several hosts a call in which the ranks differ ends the group: it is left out.
    """
    sums = model.tensor((8,), torch.float32, "refused")
    try:
        group.broadcast(sums, model.world_size)
    except UsageError:
        group.barrier()
    else:
        raise MismatchError("broadcast took a root that is no rank")
    if model.is_apart:
        return
    other = model.rank()
    try:
        group.all_reduce(sums[:4] if group.rank_in_group == other else sums)
    except DisagreementError as error:
        named = [rank for rank in range(model.world_size) if f"rank {rank}: all_reduce" in str(error)]
        check_same(named, list(range(model.world_size)), "ranks whose views the error holds")
    else:
        raise MismatchError(f"all_reduce took another length from rank {other}")
    group.barrier()


STEPS = {
    "tensors": (tensors, 30),
    "asynchronous": (asynchronous, 10),
    "coalesced": (coalesced, 4),
    "functionals": (functionals, 6),
    "objects": (objects, 12),
    "scalars": (scalars, 6),
    "tensor_dict": (tensor_dict, 6),
    "refused": (refused, 2),
}
"""By name: the step, and how often it is chosen in relation to others."""
