"""The fields of a log record: of which group and queue it is, on which rank, in which call, over which algorithm.

All loggers are those of the standard library, named after the module, and nothing here configures them. A record gets
the fields as `extra`, so that a formatter or a filter of the application can select them.

Their names have a prefix. `logging` refuses an `extra` whose name is an attribute of the record already: it raises
`KeyError` from the call that logs. Applications that run on many ranks often put `rank` into each record, by a
factory, and any unprefixed name of ours could be the next. With the prefix a formatter also finds all fields of a
record without a list of their names.
"""

from __future__ import annotations

from typing import TypedDict

__all__ = ["LogFields", "log_fields"]


class LogFields(TypedDict, total=False):
    """The fields of a record. One that is not known, or means nothing there, is absent and never None.

    So `logging.Formatter(..., defaults={"comm_rank": "-"})` serves our records as it serves those of other libraries.

    Attributes:
        comm_group: The unique name of the group.
        comm_rank: This process's global rank; for a queue that belongs to no group, the rank in the queue.
        comm_call: The call as the text names it, without its number: "all_reduce", "destroy", "connect".
        comm_algorithm: What carries the call, as `path` names it: "one-shot", "nccl"; for a new group what carries
            its tensors.
        comm_queue: The name of the queue. A queue of a group has the other fields of the group too.
    """

    comm_group: str
    comm_rank: int
    comm_call: str
    comm_algorithm: str
    comm_queue: str


def log_fields(
    *,
    group: str | None = None,
    rank: int | None = None,
    call: str | None = None,
    algorithm: str | None = None,
    queue: str | None = None,
) -> LogFields:
    """Return the fields that are given, for `extra`."""
    fields: LogFields = {}
    if group is not None:
        fields["comm_group"] = group
    if rank is not None:
        fields["comm_rank"] = rank
    if call is not None:
        fields["comm_call"] = call
    if algorithm is not None:
        fields["comm_algorithm"] = algorithm
    if queue is not None:
        fields["comm_queue"] = queue
    return fields
