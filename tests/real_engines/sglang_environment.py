"""Fetch SGLang and what its distributed layer imports: `python -m tests.real_engines.sglang_environment [FOLDER]`.

SGLang has no build for the CPU: its wheel asks for CUDA packages. This installs the wheel without them, together with
the packages that `sglang.srt.distributed.parallel_state` imports, into a folder of their own, and prints its path.
"""

import subprocess
import sys
from pathlib import Path

SGLANG = "sglang==0.5.23"
IMPORTED = (
    *(
        "aiohappyeyeballs",
        "aiohttp",
        "aiosignal",
        "annotated-types",
        "anyio",
        "apache-tvm-ffi==0.1.11",
        "attrs",
    ),
    *(
        "certifi",
        "charset-normalizer",
        "einops",
        "fastapi",
        "frozenlist",
        "idna",
        "ipython",
        "multidict",
        "orjson",
    ),
    *("packaging", "propcache", "psutil", "pybase64", "pydantic==2.14.3", "pydantic_core==2.50.4", "pyzmq"),
    *(
        "requests",
        "sniffio",
        "starlette",
        "tqdm",
        "traitlets",
        "triton",
        "typing-inspection",
        "urllib3",
        "yarl",
    ),
)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/sglang").resolve()
    done = folder / "complete"
    if not done.exists():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
        subprocess.run([*pip, "--target", str(folder), "--upgrade", SGLANG, *IMPORTED], check=True)
        done.touch()
    print(folder)


if __name__ == "__main__":
    main()
