"""Build the stand-in for libnccl."""

import subprocess
from pathlib import Path

__all__ = ["build_stub"]

SOURCE = Path(__file__).parent / "stub.c"


def build_stub(directory: Path, *flags: str, name: str = "libnccl-stub.so") -> Path:
    """Compile the stub into `directory`; `flags` such as `-DVERSION=21903` change it."""
    target = directory / name
    command = ["cc", "-O1", "-fwrapv", "-shared", "-fPIC", *flags, "-o", str(target), str(SOURCE), "-lm"]
    subprocess.run(command, check=True, timeout=60)
    return target
