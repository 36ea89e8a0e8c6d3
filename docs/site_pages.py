"""Add the pages that are elsewhere in the repository to the site, and draw the diagrams of all pages."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import mermaidx
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PACKAGES = ("coordinator", "device_comm", "shm_broadcast")
_DESIGN = re.compile(rf"\]\(\.\./((?:\.\./)*)({'|'.join(PACKAGES)})/DESIGN\.md")
PICTURES = {".svg", ".png"}
THEME = {
    "fontFamily": "Helvetica, Arial, sans-serif",
    "fontSize": "14px",
    "primaryColor": "#e4f0ff",
    "primaryBorderColor": "#7fb0ea",
    "primaryTextColor": "#123f73",
    "lineColor": "#66748a",
    "textColor": "#2b3545",
    "noteBkgColor": "#fdf0dc",
    "noteBorderColor": "#e0ad5b",
    "noteTextColor": "#6b4206",
    "edgeLabelBackground": "#fbfcfe",
    "clusterBkg": "#f3f6fa",
    "clusterBorder": "#c3ccd9",
}
"""The colors of images/planes.svg."""
SEQUENCE = {
    "mirrorActors": False,
    "height": 36,
    "messageFontSize": 14,
    "noteFontSize": 14,
    "actorFontSize": 14,
}
OPTIONS = {"theme": "base", "themeVariables": THEME, "sequence": SEQUENCE}


def on_config(config: Any) -> Any:
    """Draw each block of Mermaid while the site is built: a reader's browser runs and fetches nothing for it."""
    fence = {"name": "mermaid", "class": "diagram", "format": _draw}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}
    return config


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


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point the links of a page of this folder to DESIGN.md of a package at the site's page."""
    return _DESIGN.sub(r"](\1design/\2.md", markdown)


def _draw(source: str, *_: Any, **__: Any) -> str:
    """Return the SVG of a Mermaid block; an error in it fails the build."""
    svg = mermaidx.render(f"%%{{init: {json.dumps(OPTIONS)}}}%%\n{source}").svg()
    name = f"diagram-{hashlib.sha256(source.encode()).hexdigest()[:8]}"
    return f'<div class="diagram">{" ".join(svg.replace("my-svg", name).split())}</div>'


def _without_code_links(text: str) -> str:
    """Replace links to files that are not pages with their names."""
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)[^)]+\)", r"\1", text)
