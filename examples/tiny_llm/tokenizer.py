"""Convert between text and token ids, with the checkpoint's tokenizer or by bytes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer as TokenizerFile

from .config import ModelConfig
from .errors import DemoError

__all__ = ["ByteTokenizer", "FileTokenizer", "Tokenizer", "open_tokenizer"]

BYTES = 256


class Tokenizer(Protocol):
    """The methods of a tokenizer that the demo uses."""

    def encode(self, text: str) -> list[int]:
        """Turn a prompt into token ids, including the special tokens that the model expects before it."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Turn generated token ids into text, without special tokens."""


class ByteTokenizer:
    """One token per byte of UTF-8; special tokens have the ids above."""

    def __init__(self, bos: int | None = None) -> None:
        """Store the special token.

        Args:
            bos: Token before each prompt; None for no token.
        """
        self.bos = bos

    def encode(self, text: str) -> list[int]:
        """Turn a prompt into token ids."""
        return ([] if self.bos is None else [self.bos]) + list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Turn token ids into text; bytes that are not valid UTF-8 become escapes."""
        return bytes(token for token in tokens if token < BYTES).decode(errors="backslashreplace")


class FileTokenizer:
    """The tokenizer that a `tokenizer.json` describes."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Args:
            path: The `tokenizer.json`.

        Raises:
            DemoError: The file is unreadable or malformed.
        """
        try:
            self._tokenizer = TokenizerFile.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
            raise DemoError(f"cannot read {path}: {error}") from None

    def encode(self, text: str) -> list[int]:
        """Turn a prompt into token ids."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Turn token ids into text."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def open_tokenizer(directory: Path, config: ModelConfig) -> Tokenizer:
    """Open the tokenizer of a checkpoint directory, or the byte-level one if it has none.

    Args:
        directory: A Hugging Face checkpoint directory.
        config: Its model's shape.

    Raises:
        DemoError: The tokenizer's file is malformed, or the vocabulary is too small for bytes.
    """
    if (directory / "tokenizer.json").is_file():
        return FileTokenizer(directory / "tokenizer.json")
    if config.vocab_size < BYTES:
        raise DemoError(f"{directory} has no tokenizer.json and a vocabulary of less than {BYTES} tokens")
    return ByteTokenizer(config.bos_token_id)
