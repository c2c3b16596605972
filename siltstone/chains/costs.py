"""Turn the acknowledgements of subtasks into the costs that a policy observes: of each table and opaque variable, which
are both "table" here."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from siltstone.catalog.records.checkpoints import CheckpointRecord
from siltstone.catalog.records.commits import CheckpointCommit
from siltstone.chains.policy_rules import CheckpointCost, PolicyState, RestoreBound
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.model import Form, Handle, Kind
from siltstone.restore.live_rules import state_handles
from siltstone.restore.plan_rules import bytes_of

Recorded: TypeAlias = CheckpointRecord | CheckpointCommit
"""a checkpoint of the catalog, or one that is just committed"""
_CHAIN = (
    "rows",
    "base_bytes",
    "base_s",
    "base_rows",
    "deltas",
    "deltas_bytes",
    "deltas_s",
    "index_bytes",
    "base_factor",
    "delta_factor",
)
"""the fields of a policy's state that the catalog keeps: those about the chain"""


def _forms(received: Sequence[Acknowledgement]) -> list[dict[str, Form]]:
    """Return per subtask table -> the form that it wrote it in last."""
    return [{h.variable: h.form for h in state_handles(a.handles)} for a in received]


def _handles(a: Acknowledgement, table: str) -> list[Handle]:
    """Return the handles of what a subtask wrote of a table."""
    return [h for h in state_handles(a.handles) if h.variable == table]


def written_form(received: Sequence[Acknowledgement]) -> Form:
    """Return the form of an operator's part: a base, or files, only if every subtask wrote that of each table, and no
    delta of an opaque variable."""
    tables = _forms(received)
    if any(form is Form.DELTA for of in tables for form in of.values()):
        return Form.DELTA
    # A table of which nothing was written did not change.
    whole = all(a.table_rows.keys() <= of.keys() for a, of in zip(received, tables, strict=True))
    in_files = any(form is Form.FILES for of in tables for form in of.values())
    return (Form.FILES if in_files else Form.BASE) if whole else Form.DELTA


def written_forms(received: Sequence[Acknowledgement]) -> dict[str, Form]:
    """Return table -> the form that an operator's subtasks wrote it in: a base or files only if nobody wrote a delta.

    It did not change in subtasks that wrote nothing of it; tables that no subtask wrote are left out.
    """
    forms = _forms(received)
    tables = sorted({table for of in forms for table in of})
    deltas = {table for of in forms for table, form in of.items() if form is Form.DELTA}
    files = {table for of in forms for table, form in of.items() if form is Form.FILES}
    return {table: Form.DELTA if table in deltas else Form.FILES if table in files else Form.BASE for table in tables}


def costs_of(received: Sequence[Acknowledgement]) -> dict[str, CheckpointCost]:
    """Return table -> the cost of it in one operator's part of a checkpoint; seconds are those of the slowest subtask.

    Phases are timed for all tables of a subtask together. A table's share of them is that of its bytes among those
    that were written in the phase; the index is shared by all tables alike, and so are files, with those that were
    stored before: a restore reads all of them.
    """
    index = sum(a.bytes_of(Kind.INDEX) for a in received)
    files = sum(bytes_of(h for h in a.handles if h.form is Form.FILES) for a in received)
    forms = written_forms(received)
    tables = sorted({h.variable for a in received for h in a.handles if h.kind is Kind.INCREMENTAL})
    costs = {}
    for table, form in forms.items():
        own = [h for a in received for h in _handles(a, table)]
        gave_way = sum(a.tracked_bytes.get(table, 0) for a in received)
        costs[table] = CheckpointCost(
            form=form,
            bytes=_part(files, table, tables) if form is Form.FILES else sum(h.length for h in own),
            seconds=max((_seconds(a, table, form) for a in received), default=0.0),
            log_s=max(tracked)
            if (tracked := [_share(a, table, "track") for a in received if "track" in a.seconds])
            else None,
            rows=sum(a.table_rows.get(table, 0) for a in received),
            tracked_bytes=gave_way + sum(h.length for h in own if h.form is Form.DELTA) if gave_way else None,
            index_bytes=_part(index, table, tables),
        )
    return costs


def _part(size: int, table: str, tables: Sequence[str]) -> int:
    """Return a table's part of what all tables share alike; 0 for an opaque variable."""
    if table not in tables:
        return 0
    i = tables.index(table)
    return size * (i + 1) // len(tables) - size * i // len(tables)


def of_all_subtasks(
    cost: CheckpointCost, before: PolicyState, table: str, received: Sequence[Acknowledgement]
) -> CheckpointCost:
    """Return a table's cost as a policy must see it if only some subtasks wrote a base, and the others nothing, because
    it did not change there: their chains go on.

    If these have deltas, the checkpoint counts as a delta of what was written, so that a restore reads less than is
    counted, never more (`CheckpointCost`). If they are bases alone, the whole is a base, and what is kept is that part
    of the last base that its rows were.

    Args:
        cost: what was written (`costs_of`).
        before: the state of the table's policy.
    """
    wrote = [bool(_handles(a, table)) for a in received]
    if cost.form is Form.DELTA or all(wrote):
        return cost
    rows = [a.table_rows.get(table, a.opaque_bytes.get(table, 0)) for a in received]
    kept = sum(count for count, own in zip(rows, wrote, strict=True) if not own)
    opaque = any(table in a.opaque_bytes for a in received)
    if opaque and not any(table in a.opaque_bytes for a, own in zip(received, wrote, strict=True) if not own):
        return cost  # those that wrote nothing have no values
    if before.deltas:
        return replace(cost, form=Form.DELTA)
    written = max((count for count, own in zip(rows, wrote, strict=True) if own), default=0)
    pace = max(1.0, max(rows) / written) if written else 1.0
    if opaque:  # the bytes of values are known, before they are compressed
        kept_bytes = min(before.base_bytes, cost.bytes * kept / max(1, sum(rows) - kept))
    else:
        share = min(1.0, kept / before.base_rows) if before.base_rows else 1 - sum(wrote) / len(wrote)
        # Rows differ in width: what the others keep is at least what the writers' part leaves of the last base.
        kept_bytes = max(share * before.base_bytes, before.base_bytes - cost.bytes)
    return replace(cost, bytes=cost.bytes + round(kept_bytes), seconds=max(cost.seconds * pace, before.base_s))


def _seconds(a: Acknowledgement, table: str, form: Form) -> float:
    """Return the seconds in which a subtask wrote a table. A table that is partly a delta includes the bases of
    subtasks whose delta was too large, and what these took to find out."""
    return sum(
        _share(a, table, phase) for phase in ("base", "persist", "delta") if phase != "delta" or form is Form.DELTA
    )


def _share(a: Acknowledgement, table: str, phase: str) -> float:
    """Return a table's part of the seconds of a phase, by its bytes; opaque variables take part in "persist" alone."""
    forms = {"base": {Form.BASE, Form.FILES}, "persist": set(Form)}.get(phase, {Form.DELTA})
    kinds = {Kind.INCREMENTAL, Kind.OPAQUE} if phase == "persist" else {Kind.INCREMENTAL}
    handles = [h for h in a.handles if h.kind in kinds and h.form in forms]
    tracked = {t: size for t, size in a.tracked_bytes.items() if t in a.table_rows and phase in ("delta", "track")}
    every = sum(h.length for h in handles) + sum(tracked.values())
    own = sum(h.length for h in handles if h.variable == table) + tracked.get(table, 0)
    return a.seconds.get(phase, 0.0) * own / every if every else 0.0


def recorded_cost(record: Recorded, operator: str, table: str) -> CheckpointCost:
    """Return the cost of a table in a recorded checkpoint."""
    own = record.statistics.get("operators", {}).get(operator, {}).get("tables", {}).get(table, {})
    return CheckpointCost(
        form=Form(own.get("form", Form.DELTA)),
        bytes=int(own.get("bytes", 0)),
        seconds=own.get("seconds", 0.0),
        rows=int(own.get("rows", 0)),
        index_bytes=int(own.get("index_bytes", 0)),
    )


def recorded_chains(record: Recorded, operator: str) -> dict[str, tuple[int, PolicyState]]:
    """Return table -> (first checkpoint, sizes and seconds) of its chain, as recorded with the checkpoint.

    The rest of the policy's state is not recorded.
    """
    tables = record.statistics.get("operators", {}).get(operator, {}).get("tables", {})
    chains = {table: of["chain"] for table, of in tables.items()}
    return {table: (int(of.get("first", record.id)), PolicyState.from_json(of)) for table, of in chains.items()}


def recorded_states(record: Recorded, operator: str) -> list[PolicyState]:
    """Return the chains of an operator's tables, as `recorded_chains` does, without their beginnings."""
    return [state for _, state in recorded_chains(record, operator).values()]


def first_of(chains: Iterable[tuple[int, PolicyState]], default: int) -> int:
    """Return the checkpoint that an operator's longest chain begins with: the oldest of its tables'."""
    return min((first for first, _ in chains), default=default)


def written_whole(received: Sequence[Acknowledgement], table: str, max_parallelism: int) -> tuple[int, float]:
    """Return the bytes of an operator's bases of a table in a checkpoint, and the part of its key groups that they
    hold."""
    bases = [h for a in received for h in _handles(a, table) if h.form is Form.BASE]
    part = sum(len(h.key_groups) for h in bases) / max_parallelism
    return sum(h.length for h in bases), round(min(1.0, part), 6)


def table_statistics(
    cost: CheckpointCost | None,
    first: int,
    state: PolicyState,
    d: int,
    bound: RestoreBound,
    whole: tuple[int, float] = (0, 0.0),
) -> dict[str, Any]:
    """Return the statistics that the catalog keeps of one table of a checkpoint.

    Args:
        cost: what the checkpoint wrote of it; None for nothing.
        first: the checkpoint that its chain begins with.
        d: the D in force.
        whole: what `written_whole` returns of it.
    """
    plain = state.to_json()
    found: dict[str, Any] = {"D": d, "chain": {"first": first, **{key: plain[key] for key in _CHAIN if key in plain}}}
    found |= {"restore_bound_bytes": round(bound.bytes), "restore_bound_s": round(bound.seconds, 6)}
    if cost is None:
        return found
    written: dict[str, Any] = {
        "form": cost.form.value,
        "bytes": cost.bytes,
        "rows": cost.rows,
        "seconds": round(cost.seconds, 6),
    }
    if 0 < whole[1] < 1:  # else the form tells it
        written["whole"] = [*whole]
    return found | written | {"index_bytes": cost.index_bytes}
