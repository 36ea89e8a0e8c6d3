"""Cases of the host plane: objects, queues, tensor dicts, the creation of groups and the first use of kernels."""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.implementations import Ours, Verbs, Vllm
from benchmarks.measuring import Sampler, Subject
from benchmarks.tensor_cases import Parts
from coordinator.group import GroupCoordinator
from coordinator.settings import CoordinatorSettings
from device_comm.base import CallPath
from shm_broadcast.errors import CapabilityError

__all__ = ["PAYLOADS", "scheduler_output"]

WAITS: Final = ("adaptive", "spin", "park")
RATES: Final = (10, 50, 200, 1000, 5000)
CHUNK: Final = 500
"""Messages sent back to back and timed together."""


def scheduler_output(step: int) -> dict[str, Any]:
    """Return a scheduler's message for a decode step of eight requests: about 0.5 KB encoded."""
    return {
        "step": step,
        "ts": 0,
        "reqs": [
            {"id": f"req-{i}", "tokens": list(range(16)), "blocks": list(range(8)), "t": 0.7}
            for i in range(8)
        ],
    }


def _tiny(step: int) -> dict[str, Any]:
    return {"step": step, "ts": 0}


def _array(nbytes: int) -> Callable[[int], dict[str, Any]]:
    return lambda step: {"step": step, "ts": 0, "a": np.zeros(nbytes, np.uint8)}


PAYLOADS: Final[dict[str, tuple[Callable[[int], dict[str, Any]], float]]] = {
    "tiny, 2 ms apart": (_tiny, 0.002),
    "scheduler step, 2 ms apart": (scheduler_output, 0.002),
    "256 KB array, 2 ms apart": (_array(1 << 18), 0.002),
    "8 MB array, 20 ms apart": (_array(8 << 20), 0.02),
}


# --- queues -------------------------------------------------------------------------------------------------


def _one_way(parts: Parts, verbs: Verbs, make: Callable[[int], dict[str, Any]], gap_s: float) -> Sampler:
    """Return a sampler of the one-way latency: from before a broadcast until a waiting reader has the object.

    CLOCK_MONOTONIC is the same clock for all processes of a host.
    """
    is_writer = parts.group.rank_in_group == 0

    def sample(count: int) -> list[float]:
        parts.bench.group.barrier()
        samples = []
        due = time.monotonic()
        for step in range(count):
            if is_writer:
                # Sleep until a fixed time: with a fixed pause, the duration of sends would lower the rate.
                due += gap_s
                time.sleep(max(due - time.monotonic(), 0.0))
                message = make(step)
                message["ts"] = time.monotonic_ns()
                verbs.broadcast_object(message)
            else:
                message = verbs.broadcast_object()
                samples.append((time.monotonic_ns() - message["ts"]) / 1e9)
        return samples

    return sample


def _back_to_back(parts: Parts, verbs: Verbs, make: Callable[[int], dict[str, Any]]) -> Sampler:
    """Return a sampler of the time per message while the writer sends at full speed; readers check each message."""
    messages = [make(step) for step in range(64)]
    is_writer = parts.group.rank_in_group == 0

    def sample(count: int) -> list[float]:
        parts.bench.group.barrier()
        start = time.monotonic()
        for step in range(count):
            message = verbs.broadcast_object(messages[step % 64] if is_writer else None)
            if message["step"] != step % 64:
                raise AssertionError(f"message {step} is {message}")
        parts.bench.group.barrier()
        return [(time.monotonic() - start) / count] if count and not is_writer else []

    return sample


def _queues(parts: Parts, kept: ExitStack) -> dict[str, tuple[Verbs, CallPath]]:
    """Return the implementations that broadcast objects from one process to the others, by name."""
    found: dict[str, tuple[Verbs, CallPath]] = {}
    for wait in WAITS:
        group = kept.enter_context(
            GroupCoordinator(
                parts.group.group_ranks,
                parts.group.local_rank,
                parts.group.torch_distributed_backend,
                True,
                True,
                f"queue-{wait}",
                settings=CoordinatorSettings.resolve({}, broadcast={"wait": wait}),
            )
        )
        name = "ours" if wait == "adaptive" else f"ours, {wait}"
        found[name] = (Ours(group), CallPath("ring", f"in shared memory; readers wait: {wait}"))
    if parts.vllm is not None:
        found["vllm"] = (parts.vllm, parts.vllm.path)
    found["torch gloo"] = (parts.plain, CallPath("gloo", "pickled; first the size, then the bytes"))
    return found


def queue(parts: Parts) -> None:
    """Measure the broadcast from a scheduler to workers: latency, and messages per second."""
    with ExitStack() as kept:
        queues = _queues(parts, kept)
        for variant, (make, gap_s) in PAYLOADS.items():
            subjects = {
                name: Subject(_one_way(parts, verbs, make, gap_s), path)
                for name, (verbs, path) in queues.items()
            }
            parts.bench.measure("queue", variant, subjects, turn_s=100 * gap_s if gap_s < 0.01 else 0.4)
        for variant, make in (("tiny", _tiny), ("scheduler step", scheduler_output)):
            subjects = {
                name: Subject(_back_to_back(parts, verbs, make), path)
                for name, (verbs, path) in queues.items()
            }
            parts.bench.measure("queue", f"{variant}, back to back", subjects, calls=_messages(parts))


def _messages(parts: Parts) -> int:
    return 50 if parts.bench.effort.is_quick else CHUNK


def waiting(parts: Parts) -> None:
    """Measure the processor time of a waiting reader, by the number of messages per second."""
    with ExitStack() as kept:
        queues = _queues(parts, kept)
        for rate in RATES[1::2] if parts.bench.effort.is_quick else RATES:
            subjects = {
                name: Subject(_one_way(parts, verbs, _tiny, 1 / rate), path)
                for name, (verbs, path) in queues.items()
                # Gloo takes most of a millisecond per message and cannot keep up with higher rates.
                if name != "torch gloo" or rate <= 1000
            }
            calls = max(5, rate // (20 if parts.bench.effort.is_quick else 2))
            parts.bench.measure("waiting", f"{rate} messages/s", subjects, calls=calls, rounds=3)


# --- objects and tensor dicts -------------------------------------------------------------------------------


def objects(parts: Parts) -> None:
    """Measure an object broadcast over the host plane, without a queue: one way, right after a barrier."""
    subjects = {}
    kinds: dict[str, tuple[Verbs, CallPath]] = {
        "ours": (parts.ours, CallPath("host plane", "this group has no queue")),
        "torch gloo": (parts.plain, CallPath("gloo", "pickled; first the size, then the bytes")),
    }
    for name, (verbs, path) in kinds.items():
        subjects[name] = Subject(_after_barrier(parts, verbs), path)
    parts.bench.measure("broadcast_object", "scheduler step", subjects)


def _after_barrier(parts: Parts, verbs: Verbs) -> Sampler:
    is_writer = parts.group.rank_in_group == 0

    def sample(count: int) -> list[float]:
        samples = []
        for step in range(count):
            parts.bench.group.barrier()
            if is_writer:
                message = scheduler_output(step)
                message["ts"] = time.monotonic_ns()
                verbs.broadcast_object(message)
            else:
                sent = verbs.broadcast_object()["ts"]
                samples.append((time.monotonic_ns() - sent) / 1e9)
        return samples

    return sample


def _dicts(parts: Parts) -> dict[str, dict[str, torch.Tensor]]:
    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, dtype=torch.bfloat16, device=parts.device)

    names = ("hidden_states", "residual")
    return {
        "decode: 2 x 64 KB": {name: ones(8, 4096) for name in names},
        "prefill: 2 x 16 MB": {name: ones(2048, 4096) for name in names},
        "twelve small": {f"t{i}": ones(16) for i in range(12)},
    }


def tensor_dicts(parts: Parts) -> None:
    """Measure tensor dicts: half a round trip to the next rank, and one way from rank 0 to all."""
    kinds: dict[str, tuple[Verbs, CallPath]] = {
        "ours": (parts.ours, CallPath("shared memory", "a dict is one message")),
        "torch gloo": (parts.plain, CallPath("gloo", "metadata, then each tensor")),
    }
    # The vLLM group was created for CPU tensors.
    if parts.vllm is not None and parts.device.type == "cpu":
        kinds["vllm"] = (parts.vllm, CallPath("gloo", "metadata, then each tensor"))
    for variant, tensors in _dicts(parts).items():
        nbytes = sum(each.nbytes for each in tensors.values())
        for case, sampler in (("send/recv dict", _there_and_back), ("broadcast dict", _to_all)):
            subjects = {
                name: Subject(sampler(parts, verbs, tensors), path) for name, (verbs, path) in kinds.items()
            }
            parts.bench.measure(case, variant, subjects, nbytes=nbytes)


def _there_and_back(parts: Parts, verbs: Verbs, tensors: Mapping[str, torch.Tensor]) -> Sampler:
    rank = parts.group.rank_in_group

    def sample(count: int) -> list[float]:
        samples = []
        for _ in range(count):
            parts.bench.group.barrier()
            start = time.perf_counter()
            if rank == 0:
                verbs.send_tensor_dict(dict(tensors), 1)
                back = verbs.recv_tensor_dict(1)
                samples.append((time.perf_counter() - start) / 2)
                if back.keys() != tensors.keys():
                    raise AssertionError(f"{sorted(back)} came back")
            elif rank == 1:
                verbs.send_tensor_dict(verbs.recv_tensor_dict(0), 0)
        return samples

    return sample


def _to_all(parts: Parts, verbs: Verbs, tensors: Mapping[str, torch.Tensor]) -> Sampler:
    is_writer = parts.group.rank_in_group == 0

    def sample(count: int) -> list[float]:
        samples = []
        for _ in range(count):
            parts.bench.group.barrier()
            if is_writer:
                verbs.broadcast_tensor_dict({**tensors, "ts": time.monotonic_ns()})
            else:
                sent = verbs.broadcast_tensor_dict()["ts"]
                samples.append((time.monotonic_ns() - sent) / 1e9)
        return samples

    return sample


# --- beginnings ---------------------------------------------------------------------------------------------


def creation(parts: Parts) -> None:
    """Measure the creation of one more group of all ranks and its first barrier."""
    group = parts.group

    def of_ours() -> tuple[Callable[[], object], Callable[[], object]]:
        made = GroupCoordinator(
            group.group_ranks, group.local_rank, group.torch_distributed_backend, True, False, "made"
        )
        return made.barrier, made.destroy

    def of_torch() -> tuple[Callable[[], object], Callable[[], object]]:
        made: Any = dist.new_group(group.ranks, backend="gloo")
        return lambda: dist.barrier(group=made), lambda: dist.destroy_process_group(made)

    def of_vllm() -> tuple[Callable[[], object], Callable[[], object]]:
        made = Vllm(type(parts.vllm.group), group.ranks, group.rank) if parts.vllm else parts.plain
        return made.barrier, getattr(made.group, "destroy", lambda: None)

    makers = {"ours": of_ours, "torch gloo": of_torch}
    if parts.vllm is not None:
        makers["vllm"] = of_vllm
    subjects = {name: Subject(_creations(parts, make)) for name, make in makers.items()}
    parts.bench.measure("creation", "group and first barrier", subjects, turn_s=0.15)


def _creations(
    parts: Parts, make: Callable[[], tuple[Callable[[], object], Callable[[], object]]]
) -> Sampler:
    def sample(count: int) -> list[float]:
        samples = []
        for _ in range(count):
            parts.bench.group.barrier()
            start = time.perf_counter()
            first_use, destroy = make()
            first_use()
            samples.append(time.perf_counter() - start)
            parts.bench.group.barrier()
            destroy()
        return samples

    return sample


def first_use(parts: Parts) -> None:
    """Measure the delay of the first call of a CUDA kernel: NVRTC, or the cache on disk. Needs no device."""
    from device_comm.cuda.kernels import FAMILIES, KernelCache, KernelVariant, compiler_version

    try:
        version = compiler_version()
        importlib.import_module("cuda.bindings.nvrtc")
    except CapabilityError as error:
        parts.bench.skip("compile time of the kernels", str(error))
        return
    works = parts.group.rank_in_group == 0
    families = list(FAMILIES)
    with tempfile.TemporaryDirectory(prefix="group-coordinator-bench-") as directory:
        for family in families[:1] if parts.bench.effort.is_quick else families:
            kernels = KernelVariant(90, 2, "bfloat16", family)
            if works:  # fill the cache as an earlier process would
                KernelCache(Path(directory) / "kept").cubin(kernels)

            def cold(count: int, kernels: KernelVariant = kernels) -> list[float]:
                samples = []
                for _ in range(count if works else 0):
                    cache = KernelCache(Path(directory) / f"{time.monotonic_ns()}")
                    start = time.perf_counter()
                    cache.cubin(kernels)
                    samples.append(time.perf_counter() - start)
                return samples

            def cached(count: int, kernels: KernelVariant = kernels) -> list[float]:
                cache = KernelCache(Path(directory) / "kept")
                samples = []
                for _ in range(count if works else 0):
                    start = time.perf_counter()
                    cache.cubin(kernels)
                    samples.append(time.perf_counter() - start)
                return samples

            for variant, sample, path, calls in (
                ("compiled", cold, CallPath("nvrtc", f"NVRTC {version}, sm_90, nothing in the cache"), 1),
                ("from the cache", cached, CallPath("cache", "compiled by an earlier process"), 20),
            ):
                name = f"{family}, {variant}"
                parts.bench.measure("first use", name, {"ours": Subject(sample, path)}, calls=calls, rounds=3)
