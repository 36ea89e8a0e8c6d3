"""Add pages to the site that are elsewhere in the repository: the designs, and the benchmarks with their plots."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PACKAGES = ("coordinator", "device_comm", "shm_broadcast")
PICTURES = {".svg", ".png"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages, and point their links to each other at the site's pages."""
    for package in PACKAGES:
        text = (ROOT / package / "DESIGN.md").read_text()
        for other in PACKAGES:
            text = text.replace(f"](../{other}/DESIGN.md", f"]({other}.md")
        files.append(File.generated(config, f"design/{package}.md", content=text))
    files.append(
        File.generated(
            config,
            "benchmarks/index.md",
            content=_without_code_links((ROOT / "benchmarks" / "README.md").read_text()),
        )
    )
    for path in sorted((ROOT / "benchmarks").glob("results/**/*")):
        if path.suffix in PICTURES:
            files.append(
                File.generated(
                    config, f"benchmarks/{path.relative_to(ROOT / 'benchmarks')}", content=path.read_bytes()
                )
            )
    return files


def _without_code_links(text: str) -> str:
    """Replace links to files that are not pages with their names."""
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)[^)]+\)", r"\1", text)
