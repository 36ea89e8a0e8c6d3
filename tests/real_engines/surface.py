"""Write down what the plugins rely on: `python -m tests.real_engines.surface FOLDER… > FILE`.

Each folder holds the unpacked wheel of one version of vLLM or SGLang; nothing is imported of it. `vllm_surface.json`
and `sglang_surface.json` in `tests/unit/coordinator` are the results for the versions that the plugins are known to
fit: the public methods of the classes, and for vLLM also what their objects have, what its other modules read of them,
and what the plugin itself uses (see `vllm_uses`).
"""

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

from tests.real_engines import vllm_uses

CLASSES = {
    "vllm": {
        "GroupCoordinator": "vllm/distributed/parallel_state.py",
        "MessageQueue": "vllm/distributed/device_communicators/shm_broadcast.py",
    },
    "sglang": {"GroupCoordinator": "sglang/srt/distributed/parallel_state.py"},
}


def engine_of(folder: Path) -> str:
    """Return which engine a folder holds."""
    return "sglang" if (folder / "sglang").is_dir() else "vllm"


def version_of(folder: Path) -> str:
    """Return the version that the wheel's metadata states."""
    (metadata,) = (
        path
        for path in folder.glob("*.dist-info/METADATA")
        if re.match(r"(vllm(_cpu)?|sglang)-", path.parent.name)
    )
    found = re.search(r"^Version: (.+)$", metadata.read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def members(source: str, name: str) -> dict[str, list[str] | None]:
    """Return the parameters of each public method of a class, without `self`; None for a property or a class."""
    (found,) = (
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name
    )
    table: dict[str, list[str] | None] = {}
    for node in found.body:
        if isinstance(node, ast.ClassDef):
            table[node.name] = None
        if isinstance(node, ast.FunctionDef) and (node.name == "__init__" or not node.name.startswith("_")):
            table[node.name] = vllm_uses.parameters_of(node)
    return table


def surface(folder: Path) -> dict[str, Any]:
    """Return what the plugin for the engine in `folder` relies on."""
    engine = engine_of(folder)
    found: dict[str, Any] = {
        name: members((folder / path).read_text(), name) for name, path in CLASSES[engine].items()
    }
    if engine == "vllm":
        found["sets"] = vllm_uses.sets(folder)
        found["reads"] = vllm_uses.reads(folder)
        found["needs"] = vllm_uses.needs(folder)
    return found


def main() -> None:
    folders = [Path(each) for each in sys.argv[1:]]
    print(json.dumps({version_of(folder): surface(folder) for folder in folders}, indent=1))


if __name__ == "__main__":
    main()
