"""Write down the public methods of an engine's classes: `python -m tests.real_engines.surface FOLDER… > FILE`.

Each folder holds the unpacked wheel of one version of vLLM or SGLang; nothing is imported. `vllm_surface.json` and
`sglang_surface.json` in `tests/unit/coordinator` are the results for the versions that the plugins are known to fit.
"""

import ast
import json
import re
import sys
from pathlib import Path

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
    (metadata,) = folder.glob(f"{engine_of(folder)}*.dist-info/METADATA")
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
            kinds = {each.id for each in node.decorator_list if isinstance(each, ast.Name)}
            names = parameters(node.args)
            table[node.name] = (
                None if "property" in kinds else names if "staticmethod" in kinds else names[1:]
            )
    return table


def parameters(found: ast.arguments) -> list[str]:
    """Return parameters as `coordinator.integrations.surface` writes them."""
    places = [each.arg for each in (*found.posonlyargs, *found.args)]
    first = len(places) - len(found.defaults)
    written = [f"{name}=" if place >= first else name for place, name in enumerate(places)]
    named = zip(found.kwonlyargs, found.kw_defaults, strict=True)
    return written + [f"*{each.arg}" + ("" if default is None else "=") for each, default in named]


def main() -> None:
    folders = [Path(each) for each in sys.argv[1:]]
    table = {
        version_of(folder): {
            name: members((folder / path).read_text(), name)
            for name, path in CLASSES[engine_of(folder)].items()
        }
        for folder in folders
    }
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
