"""Read the code blocks of Markdown files and join them into programs."""

import dataclasses
import re
from pathlib import Path

FENCE = re.compile(
    r"^```(?P<language>\w*)(?P<rest>[^\n`]*)\n(?P<code>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL
)
TITLE = re.compile(r'title="([^"]*)"')
RANKS = re.compile(r"on (\d) ranks$")
NOT_RUN = "not run by the tests: "
SINGLE = "in one process"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block.

    Attributes:
        where: The file and line, for messages.
        line: The number of its first line of code.
        language: The word behind the fence, or "".
        title: The title on the site, which says how the block is run or why it is not, or "".
        code: Its text.
    """

    where: str
    line: int
    language: str
    title: str
    code: str

    @property
    def reason(self) -> str | None:
        """Return why the block is not run, or None if it is."""
        return self.title.removeprefix(NOT_RUN) if self.title.startswith(NOT_RUN) else None


@dataclasses.dataclass(kw_only=True)
class Program:
    """The blocks of one page that run one after another on a given number of ranks."""

    where: str
    ranks: int
    source: str


def blocks_of(path: Path, root: Path) -> list[Block]:
    """Return the fenced blocks of a file."""
    text = path.read_text()
    blocks = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 2
        title = TITLE.search(match["rest"])
        blocks.append(
            Block(
                where=f"{path.relative_to(root)}:{line}",
                line=line,
                language=match["language"],
                title=title[1] if title else "",
                code=match["code"],
            )
        )
    return blocks


def programs_of(blocks: list[Block]) -> list[Program]:
    """Return the Python programs of a page; a block without a title continues the previous one."""
    programs: list[Program] = []
    for block in blocks:
        if block.language != "python" or block.reason is not None:
            continue
        ranks = RANKS.match(block.title)
        if ranks or block.title == SINGLE:
            programs.append(Program(where=block.where, ranks=int(ranks[1]) if ranks else 1, source=""))
        elif block.title or not programs:
            raise ValueError(
                f"{block.where}: the title says neither how to run it nor why not: {block.title!r}"
            )
        # Keep the line numbers, because a traceback must point into the page.
        source = programs[-1].source
        programs[-1].source = source + "\n" * (block.line - 1 - source.count("\n")) + block.code
    return programs
