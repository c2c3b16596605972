"""What a step has read, and what operators made of it, as digests; whether a logged step comes again as it was.

State and sinks have what a step made the first time. If the step is run again (after a recovery, by a replay), its
source may give other rows: a file was replaced, or rows are made at random. Then state and sinks would disagree, and
nothing else would show it. So each step is recorded with

    read      of each operator that reads the source: how many rows, and their digest in all columns that it reads
    made      of each sink's operator: how many rows it made, and their digest; and of its dead letters

and compared with that when it is run again. What cannot be compared is not: other columns, an operator or a sink that
was added since.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from siltstone.catalog.records.steps import Step
from siltstone.catalog.repository import Catalog
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.decoding import check_object, parse_json, translate_decode_errors
from siltstone.errors import InputChanged, StateError
from siltstone.state.rows_digest import DigestedRows
from siltstone.stream import DEAD_LETTERS

INPUT_CHANGED = "input changed"
"""outcome of a run that could not run a logged step again as it was"""


@dataclass(frozen=True)
class OperatorDigests:
    """One operator's part of a step.

    Attributes:
        read: what it read of the source; None if it reads another operator.
        made: its own name, and `DEAD_LETTERS` -> what it made for that sink, if there is one.
    """

    read: DigestedRows | None = None
    made: Mapping[str, DigestedRows] = field(default_factory=dict)

    @classmethod
    def of(cls, received: Sequence[Acknowledgement]) -> "OperatorDigests":
        """Return what all subtasks together have read and made."""
        read = [a.read for a in received if a.read is not None]
        names = {name for a in received for name in a.made}
        return cls(
            sum(read, DigestedRows()) if read else None,
            {name: sum((a.made.get(name, DigestedRows()) for a in received), DigestedRows()) for name in sorted(names)},
        )


def find_lost_edit(catalog: Catalog, stream: str) -> int | None:
    """Return the first checkpoint of an edit by hand that a rollback has given up; None if there is none."""
    rollbacks = catalog.rollbacks.list(stream)
    edits = catalog.edits.list(stream)
    lost = (e.checkpoint for e in edits if any(each.gave_up(e.epoch, e.checkpoint) for each in rollbacks))
    return min(lost, default=None)


def encode_digests(digests: Mapping[str, OperatorDigests]) -> str:
    """Encode operator -> its part of a step as text."""
    return json.dumps(
        {
            operator: [None if of.read is None else of.read.to_json(), {n: m.to_json() for n, m in of.made.items()}]
            for operator, of in digests.items()
        },
        separators=(",", ":"),
    )


def decode_digests(text: str) -> dict[str, OperatorDigests]:
    """Decode operator -> its part of a step; nothing of an empty text.

    Raises:
        StateError: the text is damaged.
    """
    if not text:
        return {}
    with translate_decode_errors("a step of the input log in the catalog", "digests", StateError):
        found = {}
        for operator, (read, made) in check_object(parse_json(text), "digests").items():
            parts = {name: DigestedRows.from_json(of) for name, of in check_object(made, "what was made").items()}
            found[operator] = OperatorDigests(None if read is None else DigestedRows.from_json(read), parts)
        return found


def check_repeated(step: Step, operator: str, found: OperatorDigests, *, only_read: bool = False) -> None:
    """Check that one operator has read and made in a step what is recorded of it, if anything is.

    Args:
        only_read: leave out what it has made.

    Raises:
        InputChanged: it has not.
        StateError: the record is damaged.
    """
    recorded, again = decode_digests(step.digests).get(operator, OperatorDigests()), f"step {step.step} is run again"
    of = "the same input"
    if recorded.read is not None and found.read is not None:
        if recorded.read.differs(found.read):
            raise InputChanged(f"{again}, and {_tell(operator, 'read', recorded.read, found.read)}")
        of = of if recorded.read.columns == found.read.columns else "other columns"
    for name in sorted(recorded.made.keys() & found.made.keys()) if not only_read else ():
        before, now = recorded.made[name], found.made[name]
        if before.differs(now):
            what = "set aside" if name == DEAD_LETTERS else "made"
            raise InputChanged(
                f"{again}, and {_tell(operator, what, before, now)}, of {of}: its code has changed, or is not "
                "deterministic, and its sink has the rows of before"
            )


def _tell(operator: str, what: str, before: DigestedRows, now: DigestedRows) -> str:
    if before.rows != now.rows:
        return f"operator {operator} has {what} {now.rows} rows, and {before.rows} before"
    return f"operator {operator} has {what} {now.rows} rows as before, but other ones"
