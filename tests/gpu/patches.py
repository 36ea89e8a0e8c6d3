"""Variants of the kernels: their source with patches, one for each thing that is changed.

A patch is found by its name, here in `variants` or among the mistakes of `tests/native/cuda/mutations`. It applies
where its lines are, whatever their numbers, and exactly once, or not at all: a patch that no longer fits would test
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from device_comm.cuda.kernels import kernel_source

__all__ = ["FOLDERS", "patched_source"]

FOLDERS = (
    Path(__file__).parent / "variants",
    Path(__file__).parents[1] / "native" / "cuda" / "mutations",
)


def patched_source(*names: str) -> str:
    """Return the source of the kernels with the patches NAME.patch, applied in this order.

    Raises:
        ValueError: A patch does not apply exactly once.
    """
    source = kernel_source()
    for name in names:
        for old, new in _hunks(_text_of(name)):
            if source.count(old) != 1:
                raise ValueError(f"{name}.patch does not apply to the kernels any more:\n{old}")
            source = source.replace(old, new)
    return source


def _text_of(name: str) -> str:
    found = [folder / f"{name}.patch" for folder in FOLDERS if (folder / f"{name}.patch").exists()]
    if len(found) != 1:
        raise ValueError(f"there are {len(found)} patches {name}")
    return found[0].read_text()


def _hunks(patch: str) -> Iterator[tuple[str, str]]:
    """Yield the lines before and after each hunk."""
    hunks: list[list[str]] = []
    is_head = True
    for line in patch.splitlines():
        if line.startswith("@@"):
            hunks.append([])
            is_head = False
        elif line.startswith("--- a/"):
            is_head = True
        elif not is_head:
            hunks[-1].append(line)
    for lines in hunks:
        old = [line[1:] for line in lines if not line.startswith("+")]
        yield "\n".join(old), "\n".join(line[1:] for line in lines if not line.startswith("-"))
