"""The report of a run, as text and as JSON."""

import json
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .timing import OperationRow

__all__ = ["Continuation", "Report"]


@dataclass(frozen=True)
class Continuation:
    """The continuation of one prompt.

    Attributes:
        prompt: The prompt.
        text: The continuation as text.
        tokens: The continuation as token ids.
        reference_tokens: Token ids of the one-process run.
    """

    prompt: str
    text: str
    tokens: list[int]
    reference_tokens: list[int]


@dataclass(frozen=True)
class Report:
    """The outcome of a run.

    Attributes:
        tensor: Ranks that shared each layer.
        pipeline: Pipeline stages.
        steps: Number of steps.
        seconds: Duration of all steps.
        reference_seconds: Duration of the one-process run, which serves one request at a time.
        continuations: One per prompt, in the order of the prompts.
        operations: The groups' operations with their durations.
    """

    tensor: int
    pipeline: int
    steps: int
    seconds: float
    reference_seconds: float
    continuations: list[Continuation]
    operations: list[OperationRow]

    @property
    def tokens(self) -> int:
        """Number of generated tokens."""
        return sum(len(continuation.tokens) for continuation in self.continuations)

    @property
    def is_identical(self) -> bool:
        """Whether every token equals that of the one-process run."""
        return all(one.tokens == one.reference_tokens for one in self.continuations)

    @property
    def verdict(self) -> str:
        """The last line of the output."""
        if self.is_identical:
            return (
                f"OK: all {self.tokens} tokens of TP {self.tensor} x PP {self.pipeline} are identical "
                "to those of one process"
            )
        number, one = next(
            (number, one)
            for number, one in enumerate(self.continuations)
            if one.tokens != one.reference_tokens
        )
        pairs = zip(one.tokens, one.reference_tokens, strict=False)
        same = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        where = "in length" if same is None else f"from token {same} on"
        return f"FAILED: the tokens of prompt {number} differ from those of one process {where}"

    def to_json(self) -> str:
        """Return the report as one JSON object."""
        fields = asdict(self)
        fields.update(tokens=self.tokens, identical=self.is_identical)
        return json.dumps(fields)

    def show(self, console: Console) -> None:
        """Print the texts, the table and the result.

        Args:
            console: Where to print.
        """
        for one in self.continuations:
            line = Text.assemble((printable(one.prompt), "bold"), (" |", "dim"), printable(one.text))
            console.print(line, soft_wrap=True)
        table = Table(
            title="\nGroup operations: time per call, including waits for peers", title_justify="left"
        )
        for heading in ("group", "operation"):
            table.add_column(heading)
        for heading in ("calls, all ranks", "p50 µs", "p99 µs"):
            table.add_column(heading, justify="right")
        for row in self.operations:
            table.add_row(
                row.group, row.operation, str(row.count), f"{row.p50_us:,.0f}", f"{row.p99_us:,.0f}"
            )
        console.print(table)
        console.print(
            f"{self.tokens} tokens in {self.steps} steps and {self.seconds:.2f} s: "
            f"{self.tokens / self.seconds:,.0f} tokens/s "
            f"(one process, one request at a time: {self.tokens / self.reference_seconds:,.0f} tokens/s)",
            highlight=False,
            soft_wrap=True,
        )
        console.print(
            self.verdict, style="green" if self.is_identical else "bold red", highlight=False, soft_wrap=True
        )


def printable(text: str) -> str:
    """Escape characters that a terminal could interpret as a command."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in text
    )
