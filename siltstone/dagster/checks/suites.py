"""The properties of a stream that are checked: for each, its facts and what is expected of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from siltstone.dagster.checks import facts
from siltstone.dagster.checks.facts import Facts, Subject
from siltstone.pipes.outcomes import DIGEST
from siltstone.pipes.parts import CHECKPOINTS, FULL_SNAPSHOT, MATERIALIZATION

Expected = dict[str, Any]


@dataclass(frozen=True)
class Suite:
    """One property of a stream.

    Attributes:
        name: an identifier.
        description: the property in one sentence.
        gather: reads the facts.
        expectations: Great Expectations over the columns of the facts, each as type and arguments.
        row: the columns that identify a row.
        blocking: whether a failure must stop what follows, because it would spread damage.
        needs_rows: whether a table of facts without rows is a failure.
        about: the asset that has the property.
    """

    name: str
    description: str
    gather: Callable[[Subject], Facts]
    expectations: Sequence[Expected]
    row: tuple[str, ...]
    blocking: bool = False
    needs_rows: bool = True
    about: str = CHECKPOINTS


def _expect_in(column: str, *values: object) -> Expected:
    return {"type": "expect_column_values_to_be_in_set", "kwargs": {"column": column, "value_set": list(values)}}


def _expect_value(column: str) -> Expected:
    return {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": column}}


def _expect_null(column: str) -> Expected:
    return {"type": "expect_column_values_to_be_null", "kwargs": {"column": column}}


def _expect_equal(a: str, b: str, ignored: str = "neither") -> Expected:
    kwargs = {"column_A": a, "column_B": b, "ignore_row_if": ignored}
    return {"type": "expect_column_pair_values_to_be_equal", "kwargs": kwargs}


def _at_most(value: str, most: str) -> Expected:
    """Expect a column to be at most another, in rows where both have values."""
    kwargs = {"column_A": most, "column_B": value, "or_equal": True, "ignore_row_if": "either_value_is_missing"}
    return {"type": "expect_column_pair_values_a_to_be_greater_than_b", "kwargs": kwargs}


PROVEN = Suite(
    DIGEST,
    "Every retained checkpoint restores to exactly the state that the stream had: it is rebuilt from its base and "
    "deltas, and each digest is compared with the one recorded while the stream ran. New checkpoints and the newest "
    f"are proven now; of the others, {facts.SAMPLE} in turn, and for the rest the recorded proof counts.",
    facts.proofs,
    [_expect_in("proven", True)],
    ("checkpoint", "object", "reason"),
    blocking=True,
)
NO_GAP = Suite(
    "no_gap",
    "No chain has a gap: every checkpoint that a table of a retained checkpoint builds on exists.",
    facts.links,
    [_expect_in("whole", True)],
    ("checkpoint", "operator", "table", "builds_on"),
    blocking=True,
    needs_rows=False,  # operators may keep no state
)
NOTHING_MISSING = Suite(
    "nothing_missing",
    "Every object that the catalog refers to is in the store, with its recorded size.",
    facts.references,
    [_expect_value("stored_bytes"), _expect_equal("stored_bytes", "recorded_bytes", "either_value_is_missing")],
    ("checkpoint", "kind", "object", "recorded_bytes", "stored_bytes"),
    blocking=True,
)
RESTORE_COST = Suite(
    "restore_cost",
    "No chain is longer, and no restore slower, than the policy's bounds allow.",
    facts.restore_costs,
    [
        _at_most("deltas", "most_deltas"),
        _at_most("delta_bytes", "most_delta_bytes"),
        _at_most("predicted_s", "most_restore_s"),
        _at_most("restore_s", "most_restore_s"),
    ],
    (
        *("checkpoint", "operator", "deltas", "most_deltas", "delta_bytes", "most_delta_bytes"),
        *("predicted_s", "restore_s", "most_restore_s"),
    ),
)
AMPLIFICATION = Suite(
    "space_amplification",
    "No chain takes more bytes per byte of live state than the policy's bound allows.",
    facts.amplifications,
    [_at_most("amplification", "most")],
    ("checkpoint", "operator", "amplification", "most"),
)
NO_ORPHAN = Suite(
    "no_orphan",
    "The store has no object that nothing refers to and that a sweep would delete.",
    facts.orphans,
    [_expect_in("deletable", False)],
    ("reason", "objects", "bytes", "examples"),
    needs_rows=False,
)
NOT_STALLED = Suite(
    "materialization_not_stalled",
    "Materialization keeps up with every operator's chain: it neither fails repeatedly nor is overdue.",
    facts.materializations,
    [_expect_in("state", "fine")],
    ("operator", "state", "failures", "last_success", "error"),
    about=MATERIALIZATION,
)
SINK_AGREES = Suite(
    "sink_agrees",
    "The stream's sinks have the output of every completed checkpoint, exactly once, and no other output.",
    facts.sinks,
    [_expect_equal("completed", "published")],
    ("sink", "checkpoint", "completed", "published"),
    needs_rows=False,
)
RESTORE_EQUALS_SNAPSHOT = Suite(
    "restore_equals_snapshot",
    "The checkpoint, restored from base and deltas, equals the full snapshot of its live state: row count, keys, every "
    "column, and the digest of each key group.",
    facts.comparisons,
    [
        _expect_equal("restored_rows", "live_rows"),
        *(_expect_in(column, 0) for column in ("only_restored", "only_live", "unequal")),
        _expect_null("columns"),
        _expect_equal("restored_digest", "live_digest"),
    ],
    ("checkpoint", "operator", "table", "key_group", "columns", "examples"),
    blocking=True,
    needs_rows=False,  # as `NO_GAP`
    about=FULL_SNAPSHOT,
)
SUITES = (
    PROVEN,
    NO_GAP,
    NOTHING_MISSING,
    RESTORE_COST,
    AMPLIFICATION,
    NO_ORPHAN,
    NOT_STALLED,
    SINK_AGREES,
    RESTORE_EQUALS_SNAPSHOT,
)
