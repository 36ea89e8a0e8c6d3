"""Run the tests against the installed packages: `python -m tests.installed [arguments of pytest]`.

The tests are copied to a directory in which the three packages are links to the installed ones. Everything that a
test imports, compiles or reads then comes from the wheel, and no checkout is reachable.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("coordinator", "device_comm", "shm_broadcast")
COPIED = (
    "tests", "examples", "benchmarks", "docs", ".ci", ".github",
    "pyproject.toml", "setup.py", "Makefile", "mkdocs.yml",
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", ".pre-commit-config.yaml",
)  # fmt: skip

# Every test process starts like this one: it runs in the copy and has the same path.
PROBE = """
import sysconfig
from pathlib import Path
import coordinator, coordinator.cli, device_comm._core, shm_broadcast._core
place = Path(sysconfig.get_path("platlib")).resolve()
for module in (coordinator, coordinator.cli, device_comm._core, shm_broadcast._core):
    where = Path(module.__file__).resolve()
    if not where.is_relative_to(place):
        raise SystemExit(f"{module.__name__} comes from {where}, not from the installed wheel in {place}")
print(f"tests of the wheel in {place}", flush=True)
"""


def main(arguments: list[str]) -> int:
    """Copy the tests, check where the packages come from, run pytest, and return its exit status."""
    site = Path(sysconfig.get_path("platlib"))
    with tempfile.TemporaryDirectory(prefix="installed-") as name:
        tree = Path(name)
        for each in COPIED:
            source = ROOT / each
            if source.is_dir():
                shutil.copytree(source, tree / each, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, tree / each)
        for package in PACKAGES:
            if not (site / package / "py.typed").is_file():
                raise SystemExit(f"{package} is not installed in {site}")
            (tree / package).symlink_to(site / package)
        environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        environ.pop("PYTHONPATH", None)
        for command in (["-c", PROBE], ["-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]):
            done = subprocess.run([sys.executable, *command], cwd=tree, env=environ, check=False)
            if done.returncode:
                return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
