"""Check what `make dist` has built: `python -m tests.archives contents|types`.

`contents` checks that wheel and source archive hold every file of the packages, and that the wheel is an abi3 wheel.
`types` checks that pyright knows the complete type of every public name in the wheel.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("coordinator", "device_comm", "shm_broadcast")
NOT_SHIPPED = {".so", ".pyc"}


def files_of_packages() -> set[str]:
    """Return the files that a complete archive must hold, as paths in the repository."""
    return {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in NOT_SHIPPED
    }


def built(pattern: str) -> Path:
    """Return the only archive of that kind in dist/."""
    found = list((ROOT / "dist").glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"dist/ must hold one {pattern}, there are {len(found)}: run `make dist`")
    return found[0]


def check_contents() -> None:
    """Exit with a message if an archive lacks a file."""
    wheel = built("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    cores = {f"{package}/_core.abi3.so" for package in PACKAGES[1:]}
    missing = sorted((files_of_packages() | cores) - in_wheel)
    if missing or "-cp311-abi3-" not in wheel.name:
        raise SystemExit(f"{wheel.name} is not complete or not abi3; it lacks {missing}")
    source = built("*.tar.gz")
    with tarfile.open(source) as archive:
        in_source = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split("\n")
    wanted = files_of_packages() | {name for name in listed if name and (ROOT / name).exists()}
    missing = sorted(wanted - in_source - {".gitignore"})
    if missing:
        raise SystemExit(f"{source.name} lacks {missing}")
    sys.stdout.write(f"{wheel.name} and {source.name} are complete\n")


def check_types() -> None:
    """Exit with pyright's findings if the type of a public name in the wheel is incomplete."""
    with tempfile.TemporaryDirectory(prefix="types-") as name:
        home = Path(name)
        # pyright asks the first python in PATH for the location of packages.
        venv.create(home, symlinks=True)
        site = next(home.glob("lib/python*/site-packages"))
        with zipfile.ZipFile(built("*.whl")) as archive:
            archive.extractall(site)
        (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
        environ = {**os.environ, "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        if shutil.which("node"):
            environ["PYRIGHT_PYTHON_GLOBAL_NODE"] = "1"
        ask = [str(Path(sys.executable).with_name("pyright")), "--ignoreexternal", "--verifytypes"]
        for package in PACKAGES:
            asked = subprocess.run(
                [*ask, package], cwd=home, env=environ, capture_output=True, text=True, check=False
            )
            if asked.returncode or "Type completeness score: 100%" not in asked.stdout:
                raise SystemExit(asked.stdout + asked.stderr)
            sys.stdout.write(f"{package}: every public type is known\n")


if __name__ == "__main__":
    {"contents": check_contents, "types": check_types}[sys.argv[1]]()
