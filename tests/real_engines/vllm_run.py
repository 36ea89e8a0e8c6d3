"""Run one vLLM engine on the CPU with a small model of random weights, and print one line of JSON for each scenario.

It is started with the interpreter of an environment that holds vLLM, once as it is and once with this project's plugin:

    VLLM_PLUGINS=group_coordinator python -m tests.real_engines.vllm_run --tensor 2 tokens

The model decodes greedily, so runs with equal sums give equal tokens.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.engine_model import write_model
from benchmarks.process_tree import process_tree, title_of

# Most tokens of one step, and the lengths of prompts that need several.
STEP_TOKENS = 64
LONG = (200, 150, 170)
# How long after a kill the processes of an engine are watched.
ENDING_S = 20.0


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--compiled", action="store_true", help="compile the model, as vLLM does by default")
    parser.add_argument("--asynchronous", action="store_true", help="schedule a step while the last one runs")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=JSON", help="argument of vLLM's engine"
    )
    parser.add_argument(
        "scenarios", nargs="+", choices=[*SCENARIOS, NODE], help=f"{NODE}: run the workers of a further node"
    )
    return parser.parse_args(arguments)


def engine(options: argparse.Namespace, folder: str) -> Any:
    """Return vLLM's engine over the model in `folder`."""
    from vllm import LLM

    if options.asynchronous:
        schedule_asynchronously()
    llm = LLM(**arguments_of_engine(options, folder))
    is_asynchronous = llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    if is_asynchronous != options.asynchronous:
        raise RuntimeError(f"asynchronous scheduling is {is_asynchronous}")
    return llm


def schedule_asynchronously() -> None:
    """Let vLLM keep asynchronous scheduling on a CPU, where it switches it off as of no use."""
    from vllm.platforms.cpu import CpuPlatform

    adapt = CpuPlatform.check_and_update_config

    def keep(config: Any) -> None:
        adapt(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(keep)


def serve_node(options: argparse.Namespace, folder: str) -> None:
    """Run the workers of a further node until the first node's engine ends, as `vllm serve --headless` does."""
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    arguments = AsyncEngineArgs(**arguments_of_engine(options, folder))
    config = arguments.create_engine_config(usage_context=UsageContext.LLM_CLASS, headless=True)
    executor: Any = MultiprocExecutor(config, monitor_workers=False)
    executor.start_worker_monitor(inline=True)


def arguments_of_engine(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Write the model to `folder`; return the arguments of vLLM's engine over it."""
    write_model(folder)
    extra = {name: json.loads(value) for name, _, value in (each.partition("=") for each in options.set)}
    return {
        "model": folder,
        "load_format": "dummy",
        "tensor_parallel_size": options.tensor,
        "pipeline_parallel_size": options.pipeline,
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        # Less than the longest prompts, so that their prefill is divided into chunks.
        "max_num_batched_tokens": STEP_TOKENS,
        "enforce_eager": not options.compiled,
        "distributed_executor_backend": "mp",
        "seed": 1,
        **extra,
    }


def prepare(options: argparse.Namespace) -> None:
    """Set what vLLM reads from the environment on a CPU without a network."""
    cores = os.cpu_count() or 1
    ranks = options.tensor * options.pipeline
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(str(rank % cores) for rank in range(ranks)))
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    # Lets `collective_rpc` send a function to the engine's own process, where vLLM asks for it.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"


def generate(llm: Any, **how: Any) -> list[list[int]]:
    """Return the tokens that follow prompts; the arguments are those of `answers_of`."""
    return tokens_of(answers_of(llm, **how))


def tokens_of(answers: Sequence[Any]) -> list[list[int]]:
    """Return the tokens of vLLM's answers."""
    return [list(answer.outputs[0].token_ids) for answer in answers]


def answers_of(
    llm: Any, lengths: Sequence[int] = (4, 5, 6, 7), tokens: int = 16, temperature: float = 0.0
) -> Sequence[Any]:
    """Return vLLM's answers to prompts of these lengths."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompts = [
        TokensPrompt(prompt_token_ids=[(11 * each + 7 * place) % 250 + 3 for place in range(length)])
        for each, length in enumerate(lengths)
    ]
    sampling = [
        SamplingParams(max_tokens=tokens, temperature=temperature, seed=each, ignore_eos=True)
        for each in range(len(prompts))
    ]
    answers: Sequence[Any] = llm.generate(prompts, sampling, use_tqdm=False)
    return answers


def processes(kind: str) -> list[int]:
    """Return the process ids of the engine's core ("EngineCore") or of its workers ("Worker"), by rank."""
    found = []
    for process in process_tree(os.getpid()):
        with suppress(OSError):  # it has ended meanwhile
            title = title_of(process.pid)
            if title.startswith(f"VLLM::{kind}"):
                found.append((title, process.pid))
    return [pid for _, pid in sorted(found)]


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or only its parent has not asked how it ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return True
    return state in "ZX"


# --- scenarios: each takes the engine, and returns what is printed ---------------------------------------------


def tokens(llm: Any) -> Any:
    """Decode four requests at once, first greedily, then by drawing with a seed."""
    return [generate(llm), generate(llm, temperature=1.0)]


def structured(llm: Any) -> Any:
    """Decode text that a pattern and a schema prescribe, so that the grammar's bit masks travel to the workers."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    schema = {"type": "object", "properties": {"rank": {"type": "boolean"}}, "required": ["rank"]}
    forms = [StructuredOutputsParams(regex="[0-9]{3}-[a-f]{4}"), StructuredOutputsParams(json=schema)]
    sampling = [SamplingParams(max_tokens=40, temperature=0, structured_outputs=form) for form in forms]
    answers = llm.generate(["a number: ", "an object: "], sampling, use_tqdm=False)
    return [answer.outputs[0].text for answer in answers]


def prefix(llm: Any) -> Any:
    """Decode long prompts twice; return the tokens, and how many of each prompt were found in the cache."""
    scheduler = llm.llm_engine.vllm_config.scheduler_config
    if not scheduler.enable_chunked_prefill or scheduler.max_num_batched_tokens >= min(LONG):
        raise RuntimeError(f"prompts of {LONG} tokens are not prefilled in chunks: {scheduler}")
    answers = [answers_of(llm, LONG, 8) for _ in range(2)]
    return {
        "tokens": [tokens_of(each) for each in answers],
        "cached": [[answer.num_cached_tokens for answer in each] for each in answers],
    }


def rpc(llm: Any) -> Any:
    """Call methods of the workers by name and by function, with results, and with an error."""

    def rank_of(worker: Any, scale: int) -> int:
        return int(worker.rank) * scale

    def fail(worker: Any) -> None:
        raise ValueError(f"rank {worker.rank} fails on purpose")

    results = [llm.collective_rpc("check_health"), llm.collective_rpc(rank_of, args=(3,))]
    try:
        llm.collective_rpc(fail)
    except Exception as error:
        results.append("fails on purpose" in str(error))
    return results


def kill(llm: Any) -> Any:
    """Kill the last worker while it decodes; return when the client raised, the error, and when the others ended.

    Times are in seconds from the kill; None stands for a process that runs on `ENDING_S` later.
    """
    *others, victim = processes("Worker")
    left = {"core": processes("EngineCore"), "workers": others}
    killed_s = []

    def shoot() -> None:
        killed_s.append(time.monotonic())
        os.kill(victim, signal.SIGKILL)

    threading.Timer(1.0, shoot).start()
    try:
        while True:
            generate(llm, tokens=64)
    except Exception as error:
        raised_s, text = time.monotonic() - killed_s[0], repr(error)
    ended: dict[str, list[float | None]] = {
        name: [ended_after(pid, killed_s[0]) for pid in pids] for name, pids in left.items()
    }
    return {"seconds": raised_s, "victim": victim, "error": text, "ended": ended}


def ended_after(pid: int, start_s: float) -> float | None:
    """Wait until a process has ended, at most until `ENDING_S` after `start_s`; return how long after, or None.

    Processes are waited for one after the other, so that a time may be too long, but is never too short.
    """
    while not has_ended(pid):
        if time.monotonic() - start_s > ENDING_S:
            return None
        time.sleep(0.02)
    return time.monotonic() - start_s


def sleep(llm: Any) -> Any:
    """Decode after vLLM slept and woke up, which changes nothing on a CPU."""
    llm.sleep(level=1)
    llm.wake_up()
    return generate(llm)


NODE = "node"
SCENARIOS: dict[str, Callable[[Any], Any]] = {
    each.__name__: each for each in (tokens, prefix, structured, rpc, sleep, kill)
}


def say(name: str, result: Any) -> None:
    """Print a result by one system call, because two ranks of a launcher may write to one pipe."""
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), f"RESULT {name} {json.dumps(result)}\n".encode())


def main() -> None:
    options = parsed()
    prepare(options)
    with tempfile.TemporaryDirectory() as folder:
        if options.scenarios == [NODE]:
            serve_node(options, folder)
            return
        start = time.monotonic()
        llm = engine(options, folder)
        try:
            say("start", time.monotonic() - start)
            for name in options.scenarios:
                say(name, SCENARIOS[name](llm))
        finally:
            llm.llm_engine.engine_core.shutdown()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
