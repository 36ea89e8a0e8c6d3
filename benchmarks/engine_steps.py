"""Run one vLLM engine on the CPU, and measure what the standard input asks for.

`benchmarks.engines` starts this with the interpreter of an environment that holds vLLM, as it is or with our plugin.
It writes "ready", then reads lines: `steps N` decodes N times 64 tokens for each of 4 prompts, `silent N` does so
without the collectives of the tensor-parallel ranks, `short N` asks for 4 tokens N times with a pause of 100 ms after
each, `meeting N` lets the ranks only wait for each other in place of each collective, `tokens` returns what one
decoding gives, and `versions` those of vLLM and torch. Each answer is a line of JSON.
The model is small, so a large part of a step is not its arithmetic.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import tempfile
import time
from typing import Any, Final

from benchmarks.engine_model import write_model
from benchmarks.engine_silence import WORKER_EXTENSION
from benchmarks.process_tree import process_tree

REQUESTS: Final = 4
TOKENS: Final = 64
# An engine with little to do: a request of four tokens, and then a pause.
SHORT_TOKENS: Final = 4
PAUSE_S: Final = 0.1


def parsed() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--compiled", action="store_true")
    return parser.parse_args()


def processor_s() -> float:
    """Return the processor time in seconds that this process and its descendants have used."""
    return sum(each.processor_s for each in process_tree(os.getpid()))


def start_engine(options: argparse.Namespace, folder: str) -> Any:
    """Start vLLM; its workers are bound to one core each."""
    cores = os.cpu_count() or 1
    ranks = options.tensor * options.pipeline
    os.environ.update(
        VLLM_CPU_OMP_THREADS_BIND="|".join(str(rank % cores) for rank in range(ranks)),
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
        worker_extension_cls=WORKER_EXTENSION,
    )


def decode(llm: Any, requests: int, tokens: int) -> list[list[int]]:
    """Decode `tokens` tokens for each of `requests` prompts, greedily."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=[20 + each, 30, 40, 50]) for each in range(requests)]
    greedy = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    return [list(answer.outputs[0].token_ids) for answer in llm.generate(prompts, greedy, use_tqdm=False)]


def answer(llm: Any, command: str) -> dict[str, Any]:
    """Do what a line of the input asks for."""
    name, _, count = command.partition(" ")
    if name == "tokens":
        return {"tokens": decode(llm, REQUESTS, TOKENS)}
    if name == "versions":
        return {each: sys.modules[each].__version__ for each in ("vllm", "torch")}
    if name not in ("steps", "silent", "meeting", "short"):
        raise SystemExit(f"unknown command {command!r}")
    if name not in ("silent", "meeting"):
        return measured(llm, name, int(count))
    with tempfile.NamedTemporaryFile() as page:
        page.write(bytes(mmap.PAGESIZE))
        page.flush()
        how = {"silent": True, "meet_at": page.name if name == "meeting" else ""}
        llm.collective_rpc("leave_out_collectives", kwargs=how)
        try:
            return measured(llm, name, int(count))
        finally:
            llm.collective_rpc("leave_out_collectives", kwargs={"silent": False})


def measured(llm: Any, name: str, count: int) -> dict[str, Any]:
    """Decode `count` times as the command `name` says; return what it took."""
    took_ms, used, since = [], processor_s(), time.perf_counter()
    for _ in range(count):
        start = time.perf_counter()
        if name != "short":
            decode(llm, REQUESTS, TOKENS)
            took_ms.append((time.perf_counter() - start) * 1e3 / TOKENS)
        else:
            decode(llm, 1, SHORT_TOKENS)
            took_ms.append((time.perf_counter() - start) * 1e3)
            time.sleep(PAUSE_S)
    used, took_s = processor_s() - used, time.perf_counter() - since
    return {"took_ms": took_ms, "cpu_s": used, "cores": used / took_s}


def main() -> None:
    """Run one engine until the input ends."""
    options = parsed()
    # vLLM and its workers print to the standard output, which is the caller's.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        llm = start_engine(options, folder)
        try:
            print("ready", file=answers, flush=True)
            for line in sys.stdin:
                print(json.dumps(answer(llm, line.strip())), file=answers, flush=True)
        finally:
            llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
