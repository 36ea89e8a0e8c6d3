"""What `setup.py` refuses before it compiles anything."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("pretence", "reason"),
    [
        (
            "sysconfig.get_config_var = lambda name: int(name == 'Py_GIL_DISABLED')",
            "is a free-threaded build",
        ),
        ("sys.platform = 'darwin'", "needs Linux"),
    ],
)
def test_a_platform_that_cannot_work_is_refused(pretence: str, reason: str) -> None:
    """The text is what pip shows; without it, the native cores would be built and corrupt their state."""
    # What setup.py imports is imported before: on a pretended platform these modules find no configuration.
    code = f"import runpy, setuptools.command.build_ext, sys, sysconfig\n{pretence}\n"
    code += "sys.argv = ['setup.py', '--version']\nrunpy.run_path('setup.py')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert reason in done.stderr
