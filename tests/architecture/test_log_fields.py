"""Every log record carries our fields, unless it is about no group, queue or call; see `log_fields.py`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture import rules

ROOT = Path(__file__).parents[2]
PYTHON = sorted(
    path for layer in ("shm_broadcast", "device_comm", "coordinator") for path in (ROOT / layer).rglob("*.py")
)
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
CACHE = "a cache on disk, which all groups and processes of a user share"
PLUGIN = "what a process of an engine uses, said before there is a group"

# The file and the beginning of the text of each record without fields, and why it has none.
WITHOUT_FIELDS = {
    ("device_comm/cuda/kernels.py", "NVRTC %s does not know sm_%d"): "the compiler of the process",
    ("device_comm/cuda/kernels.py", "the kernel cache at %s was not written"): CACHE,
    ("device_comm/cuda/kernels.py", "the kernel cache at %s cannot be read"): CACHE,
    ("device_comm/cuda/kernels.py", "the kernel cache at %s is damaged"): CACHE,
    ("device_comm/cuda/custom/peer_access.py", "ignored %s"): CACHE,
    ("device_comm/cuda/custom/peer_access.py", "the result of the peer access test was not kept"): CACHE,
    ("device_comm/cuda/topology.py", "the links to devices that"): "the devices of the process, said once",
    ("coordinator/integrations/sglang/plugin.py", "group_coordinator: SGLang %s runs with its own"): PLUGIN,
    ("coordinator/integrations/sglang/plugin.py", "group_coordinator %s: process %d of SGLang"): PLUGIN,
    ("coordinator/integrations/sglang/plugin.py", "cannot import %s"): PLUGIN,
    ("coordinator/integrations/vllm/plugin.py", "group_coordinator: vLLM %s runs with its own"): PLUGIN,
    ("coordinator/integrations/vllm/plugin.py", "group_coordinator: not verified with"): PLUGIN,
    ("coordinator/integrations/vllm/plugin.py", "group_coordinator: cannot import %s"): PLUGIN,
    ("coordinator/integrations/vllm/announcement.py", "group_coordinator %s: process %d of vLLM"): PLUGIN,
}


def records(source: str) -> Iterator[tuple[str, str, bool]]:
    """Yield the logger, the text ("" if it is no constant) and whether there are fields, of each call that logs."""
    if "logg" not in source:
        return  # it has no name of a logger; to parse every file took two seconds, in each process that collects tests
    for node in rules.nodes(source):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        logger = ast.unparse(node.func.value)
        if node.func.attr not in LEVELS or logger.rpartition(".")[2] not in ("logger", "logging"):
            continue
        texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
        text = next((each for each in texts if isinstance(each, str)), "")
        yield logger, text, any(keyword.arg == "extra" for keyword in node.keywords)


FOUND = [
    (str(path.relative_to(ROOT)), logger, text, has_fields)
    for path in PYTHON
    for logger, text, has_fields in records(path.read_text())
]


def reason_of(file: str, text: str) -> tuple[str, str] | None:
    """Return the key of the list that allows a record to have no fields, or None."""
    return next((key for key in WITHOUT_FIELDS if key[0] == file and text.startswith(key[1])), None)


@pytest.mark.parametrize("file", sorted({file for file, *_ in FOUND}))
def test_every_record_has_fields(file: str) -> None:
    """A call that logs passes `extra`, or stands on the list with the reason why it cannot."""
    texts = [text for where, _, text, has_fields in FOUND if where == file and not has_fields]
    assert [text for text in texts if reason_of(file, text) is None] == []


def test_the_list_has_no_needless_entry() -> None:
    """Each entry names one record, which has no fields."""
    without = [reason_of(file, text) for file, _, text, has_fields in FOUND if not has_fields]
    assert sorted(key for key in without if key is not None) == sorted(WITHOUT_FIELDS)


def test_every_record_comes_from_a_logger_of_its_module() -> None:
    """Nobody logs by the root logger, which applications filter least."""
    assert len(FOUND) > 30
    assert {logger for _, logger, _, _ in FOUND} == {"logger"}


def test_nothing_configures_logging() -> None:
    """The application alone chooses levels, handlers and formatters."""
    configuring = {
        "basicConfig",
        "addHandler",
        "setLevel",
        "setLoggerClass",
        "setLogRecordFactory",
        "addFilter",
    }
    found = {
        (str(path.relative_to(ROOT)), node.attr)
        for path in PYTHON
        for node in rules.nodes(path.read_text())
        if isinstance(node, ast.Attribute) and node.attr in configuring
    }
    assert found == set()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("logger.info('a %s', 1)", [("logger", "a %s", False)]),
        ("self.logger.log(10, 'a', extra=fields)", [("self.logger", "a", True)]),
        ("logging.warning(text)", [("logging", "", False)]),
        ("status.error('a')", []),
    ],
)
def test_the_rule_finds_records(source: str, found: list[tuple[str, str, bool]]) -> None:
    """By the name of the logger and of the level."""
    assert list(records(source)) == found
