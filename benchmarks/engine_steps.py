"""Measure the steps of one vLLM engine on the CPU, and print them as a line of JSON.

`benchmarks.engines` starts this with the interpreter of an environment that holds vLLM, in turn as it is and with our
plugin. The model is small, so a large part of a step is communication.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.engine_model import write_model

# The first rounds fill caches and choose kernels.
WARM_UP: Final = 2
REQUESTS: Final = 4
TOKENS: Final = 64
# An engine with little to do: a request of four tokens, and then a pause.
SHORT_TOKENS: Final = 4
SHORT_REQUESTS: Final = 60
PAUSE_S: Final = 0.1


def parsed() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--rounds", type=int, default=12)
    return parser.parse_args()


def processor_s() -> float:
    """Return the processor time in seconds that this process and its descendants have used."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                parents[int(entry.name)] = int(fields[1])
                ticks[int(entry.name)] = int(fields[11]) + int(fields[12])
    total = 0
    for pid, used in ticks.items():
        ancestor = pid
        while ancestor not in (os.getpid(), 0):
            ancestor = parents.get(ancestor, 0)
        total += used if ancestor else 0
    return total / os.sysconf("SC_CLK_TCK")


def start_engine(options: argparse.Namespace, folder: str) -> Any:
    """Start vLLM; its workers are bound to one core each."""
    cores = os.cpu_count() or 1
    places = "|".join(str(rank % cores) for rank in range(options.tensor * options.pipeline))
    os.environ.update(
        VLLM_CPU_OMP_THREADS_BIND=places,
        VLLM_CPU_KVCACHE_SPACE="1",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
    )
    from vllm import LLM

    write_model(folder)
    return LLM(
        model=folder,
        load_format="dummy",
        seed=1,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        enforce_eager=not options.compiled,
        tensor_parallel_size=options.tensor,
        pipeline_parallel_size=options.pipeline,
        distributed_executor_backend="mp",
    )


def decode(llm: Any, requests: int, tokens: int) -> list[list[int]]:
    """Decode `tokens` tokens for each of `requests` prompts, greedily."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=[20 + each, 30, 40, 50]) for each in range(requests)]
    greedy = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    return [list(answer.outputs[0].token_ids) for answer in llm.generate(prompts, greedy, use_tqdm=False)]


def measure(llm: Any, rounds: int) -> dict[str, Any]:
    """Return the time of a step in each round, and what short requests with pauses take and cost."""
    steps_ms = []
    for number in range(WARM_UP + rounds):
        start = time.perf_counter()
        decode(llm, REQUESTS, TOKENS)
        if number >= WARM_UP:
            steps_ms.append((time.perf_counter() - start) * 1e3 / TOKENS)
    short_ms, used, since = [], processor_s(), time.perf_counter()
    for _ in range(SHORT_REQUESTS):
        start = time.perf_counter()
        decode(llm, 1, SHORT_TOKENS)
        short_ms.append((time.perf_counter() - start) * 1e3)
        time.sleep(PAUSE_S)
    cores = (processor_s() - used) / (time.perf_counter() - since)
    return {
        "steps_ms": steps_ms,
        "short_ms": short_ms,
        "short_cores": cores,
        "tokens": decode(llm, REQUESTS, TOKENS),
    }


def main() -> None:
    """Run one engine."""
    options = parsed()
    with tempfile.TemporaryDirectory() as folder:
        llm = start_engine(options, folder)
        try:
            print("FIGURES " + json.dumps(measure(llm, options.rounds)), flush=True)
        finally:
            llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
