"""Read a rank's slices of a Hugging Face checkpoint directory, and write small checkpoints."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .config import ModelConfig, read_json
from .errors import DemoError

__all__ = ["Checkpoint", "Shard", "write_checkpoint"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class Shard:
    """A rank's piece of a tensor: `[start, stop)` along `dim`, out of `size`.

    Attributes:
        dim: 0 or 1.
        start: First index of the piece.
        stop: One past the last index. A piece that extends beyond `size` is padded with zeros.
        size: Length of the whole tensor along `dim`.
    """

    dim: int
    start: int
    stop: int
    size: int


class Checkpoint:
    """An open directory of safetensors files. Reads only the requested slices, into float32 tensors.

    Attributes:
        bytes_read: Bytes of weights read from the files so far.
        total_bytes: Size of all weight files.
    """

    def __init__(self, directory: Path) -> None:
        """Open the files: `model.safetensors`, or those that `model.safetensors.index.json` lists.

        Args:
            directory: A Hugging Face checkpoint directory.

        Raises:
            DemoError: There are no weights, or a file is missing or malformed.
        """
        self.directory = directory
        self.bytes_read = 0
        self._file_of = _files_by_tensor(directory)
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()
        for name in sorted(set(self._file_of.values())):
            try:
                self._open[name] = self._stack.enter_context(safe_open(directory / name, framework="pt"))
            except (OSError, SafetensorError) as error:
                self.close()
                raise DemoError(f"cannot read {directory / name}: {error}") from None
        self.total_bytes = sum((directory / name).stat().st_size for name in self._open)

    def __enter__(self) -> Self:
        """Return the open checkpoint."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files."""
        self.close()

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._open.clear()
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        """Return whether the checkpoint holds a tensor of this name."""
        return name in self._file_of

    def read_into(self, target: torch.Tensor, name: str, shard: Shard | None = None) -> None:
        """Fill a tensor with a weight, or with one rank's piece of it.

        Args:
            target: The float32 tensor to fill.
            name: The weight's name in the checkpoint.
            shard: The piece; None for the whole weight.

        Raises:
            DemoError: The checkpoint has no such weight, or the weight has another shape or an integer dtype.
        """
        if name not in self._file_of:
            raise DemoError(f"{self.directory}: there is no weight {name!r}")
        piece = self._open[self._file_of[name]].get_slice(name)
        expected = list(target.shape)
        if shard is not None:
            expected[shard.dim] = shard.size
        if list(piece.get_shape()) != expected:
            raise DemoError(f"{self.directory}: {name!r} has shape {piece.get_shape()}, not {expected}")
        if shard is None:
            values: torch.Tensor = piece[:]
        else:
            stop = min(shard.stop, shard.size)
            start = min(shard.start, stop)
            values = piece[start:stop] if shard.dim == 0 else piece[:, start:stop]
        if not values.is_floating_point():
            raise DemoError(
                f"{self.directory}: {name!r} is {values.dtype}: quantized weights are not supported"
            )
        self.bytes_read += values.nbytes
        with torch.no_grad():
            target.zero_()
            into = target if shard is None else target.narrow(shard.dim, 0, values.shape[shard.dim])
            into.copy_(values)


def _files_by_tensor(directory: Path) -> dict[str, str]:
    """Map each tensor's name to the file that holds it.

    Raises:
        DemoError: There are no weights, or the index is malformed or names a file outside the directory.
    """
    if (directory / INDEX_FILE).is_file():
        weight_map = read_json(directory / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise DemoError(f"{directory / INDEX_FILE} has no weight_map")
        for file in weight_map.values():
            if not isinstance(file, str) or Path(file).name != file:
                raise DemoError(f"{directory / INDEX_FILE} names a file outside the directory: {file!r}")
        return weight_map
    if not (directory / SINGLE_FILE).is_file():
        raise DemoError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    try:
        with safe_open(directory / SINGLE_FILE, framework="pt") as file:
            return dict.fromkeys(file.keys(), SINGLE_FILE)
    except (OSError, SafetensorError) as error:
        raise DemoError(f"cannot read {directory / SINGLE_FILE}: {error}") from None


def write_checkpoint(
    directory: Path, config: ModelConfig, weights: Mapping[str, torch.Tensor], files: int = 1
) -> None:
    """Write a checkpoint directory that this demo and other Llama implementations can load.

    Args:
        directory: Target directory; it is created.
        config: The model's shape.
        weights: All weights by name.
        files: Number of weight files; with more than one, an index is written too.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config.to_mapping(), indent=2), encoding="utf-8")
    metadata = {"format": "pt"}
    if files == 1:
        save_file(dict(weights), directory / SINGLE_FILE, metadata)
        return
    weight_map = {}
    names = list(weights)
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        chosen = names[number::files]
        save_file({name: weights[name] for name in chosen}, directory / file, metadata)
        weight_map.update(dict.fromkeys(chosen, file))
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in weights.values())},
        "weight_map": weight_map,
    }
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")
