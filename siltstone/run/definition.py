"""Compare a stream's definition with the recorded one: some changes fit recorded state, others do not."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from siltstone.catalog.records.commit_details import INPUTS, check_inputs
from siltstone.catalog.records.streams import StreamRecord
from siltstone.catalog.repository import Catalog
from siltstone.decoding import translate_decode_errors
from siltstone.errors import SchemaConflict, StateError, UsageError
from siltstone.operator import SOURCE
from siltstone.run.widening_rules import describe, follows
from siltstone.secret import FILE, Secret
from siltstone.state.schema import TableSchema, key_follows
from siltstone.stream import Stream

SECRET = "secret"
"""key of a recorded definition with the names of secret options"""
COLUMNS = "columns"
"""key of what is recorded of a source with the columns that operators read, as `SourceShape.read`"""
SOURCES = "sources"
"""key of what is recorded of a source with `SourceShape.sources`"""
_OF_STATE = ("operators", COLUMNS, SOURCES, INPUTS)
"""keys of a recorded definition with what depends on state and on what was read"""


@dataclass(frozen=True)
class SourceShape:
    """What a source is made of, and its columns, each described as for `run.widening_rules`: its `type`, and its
    `collations` if its texts have any.

    Attributes:
        every: all of them, by name.
        read: those that operators read.
        reads_all: whether an operator reads all there are.
        sources: what tells each of Spark's sources from others, in order; None if they have names, which Spark records.
    """

    every: Mapping[str, Mapping[str, Any]]
    read: Mapping[str, Mapping[str, Any]]
    reads_all: bool
    sources: Sequence[str] | None = None

    def recorded(self) -> dict[str, Any]:
        """Return what a definition records of it."""
        return {COLUMNS: dict(self.read), **({} if self.sources is None else {SOURCES: list(self.sources)})}


def is_named(stream: Stream) -> bool:
    """Whether a stream's sources are recorded by their names; not if its only one is called "source"."""
    return stream.source_names != (SOURCE,)


def with_shapes(definition: Mapping[str, Any], shapes: Mapping[str, SourceShape]) -> dict[str, Any]:
    """Return a definition with the shapes of sources that it has; what is not known of one stays as it was recorded."""
    if INPUTS not in definition:
        return {**definition, **(shapes[SOURCE].recorded() if SOURCE in shapes else {})}
    known = {name: {**of, **(shapes[name].recorded() if name in shapes else {})} for name, of in _inputs(definition)}
    return {**definition, INPUTS: known}


def keep_shapes(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definition of now with what is recorded of the sources that it still has."""
    before = dict(_inputs(recorded))
    if INPUTS not in now:
        return {**now, **before.get(SOURCE, {})}
    return {**now, INPUTS: {name: before.get(name, of) for name, of in _inputs(now)}}


def _inputs(definition: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return source -> what a definition records of it; none if it was recorded before any had been read."""
    if INPUTS in definition:
        return [(name, dict(of)) for name, of in definition[INPUTS].items()]
    known = {key: definition[key] for key in (COLUMNS, SOURCES) if key in definition}
    return [(SOURCE, known)] if known else []


def check_source_shapes(stream: str, definition: Mapping[str, Any], now: Mapping[str, SourceShape]) -> None:
    """Check that operators read what they did of each source: the same sources of Spark's in the same order, and the
    same columns, whose types may widen (`run.widening_rules`). Whether a source may read another place is left to
    Spark.

    Raises:
        SchemaConflict: they do not.
        StateError: the recorded definition is damaged.
    """
    with translate_decode_errors(f"the definition of stream {stream} in the catalog", "columns", StateError):
        recorded = check_inputs(definition)
    for name, shape in now.items():
        before = recorded.get(name, {})
        if shape.sources is not None and before.get(SOURCES):
            reader = f"stream {stream}" if name == SOURCE else f"source {name} of stream {stream}"
            _check_sources(reader, before[SOURCES], shape.sources)
        which = f"the source of stream {stream}" if name == SOURCE else f"source {name} of stream {stream}"
        _check_columns(stream, which, before.get(COLUMNS, {}), shape)


def _check_columns(stream: str, which: str, recorded: Mapping[str, Any], now: SourceShape) -> None:
    with translate_decode_errors(f"the definition of stream {stream} in the catalog", "columns", StateError):
        read = recorded if now.reads_all else {name: of for name, of in recorded.items() if name in now.read}
        changed = {name: describe(of) for name, of in read.items() if not follows(of, now.every.get(name))}
    for name, kind in changed.items():
        there = f"it is {describe(now.every[name])}" if name in now.every else "there is none"
        raise SchemaConflict(
            f"column {name} of {which} was {kind}, and now {there}: its rows would be read as something else",
            advice="convert it in the source to what it was, or start a stream of another name; a type may only widen, "
            "such as integer to long",
        )


def _check_sources(reader: str, before: Sequence[str], now: Sequence[str]) -> None:
    if len(before) != len(now):
        raise SchemaConflict(
            f"{reader} reads {len(now)} of Spark's sources, and was recorded with {len(before)}: Spark goes on with "
            "each by its place among them",
            advice="bring back those that were there, and no other, or start a stream of another name",
        )
    moved = [number for number, (old, new) in enumerate(zip(before, now, strict=True), 1) if old != new]
    if moved and sorted(before) == sorted(now):
        raise SchemaConflict(
            f"the sources of {reader} have another order than they were recorded in (those at {moved} have changed "
            "places): Spark goes on with each by its place among them",
            advice="bring the order back",
        )


def definition_of(stream: Stream, options: Mapping[str, str]) -> dict[str, Any]:
    """Describe the operators' variables with their schemas, the names of the sources, and the source options, as JSON;
    secret options by name.

    Raises:
        UsageError: the stream has no such option, or the option is secret.
    """
    unknown = sorted(set(options) - set(stream.options))
    if unknown:
        known = ", ".join(sorted(stream.options)) or "none"
        raise UsageError(f"stream {stream.name} has no source option {unknown[0]!r} (it has: {known})")
    for name, secret in stream.options.items():
        if isinstance(secret, Secret) and name in options:
            raise UsageError(
                f"the source option {name} of stream {stream.name} is secret: set it only by {secret.variable} in the "
                f"environment, or by a file named in {secret.variable}{FILE}"
            )
    plain = {name: value for name, value in stream.options.items() if not isinstance(value, Secret)}
    definition = {**stream.definition(), "options": {**plain, **options}}
    if is_named(stream):
        definition[INPUTS] = {name: {} for name in stream.read_sources}
    hidden = sorted(stream.options.keys() - plain.keys())
    return {**definition, SECRET: hidden} if hidden else definition


def recorded_options(stream: Stream, recorded: Mapping[str, Any]) -> dict[str, str]:
    """Return the source options of a recorded definition, without those that are secret now."""
    options = recorded["options"]
    return {name: value for name, value in options.items() if not isinstance(stream.options.get(name), Secret)}


def check_run(stream: Stream, options: Mapping[str, str], parallelism: int) -> None:
    """Check options that do not depend on recorded state.

    Raises:
        UsageError: the stream has no such option, or the parallelism exceeds the number of key groups.
    """
    check_parallelism(parallelism, stream.max_parallelism)
    definition_of(stream, options)


def check_parallelism(parallelism: int, max_parallelism: int) -> None:
    """Check that an operator has no more tasks than key groups.

    Raises:
        UsageError
    """
    if not 1 <= parallelism <= max_parallelism:
        raise UsageError(f"parallelism is {parallelism}: use 1 to max_parallelism {max_parallelism}")


def check_recorded(
    catalog: Catalog, stream: Stream, options: Mapping[str, str], drop: Sequence[str] = ()
) -> Mapping[str, Any]:
    """Check that a run's definition and options fit the recorded state; a new stream may have any.

    Returns:
        The recorded definition; empty for a new stream.

    Raises:
        SchemaConflict, UsageError: see `check_follows`.
        UsageError: the stream is a fork, and the definition does not name its origin.
    """
    record = next((record for record in catalog.streams.list() if record.name == stream.name), None)
    if record is None:
        if drop:
            raise UsageError(f"stream {stream.name} has not run here: it has no {drop[0]} to drop; leave out --drop")
        return {}
    if record.forked_from is not None and stream.origin != (origin := catalog.forks.get_lineage(stream.name)[-1]):
        # Its source would prepare files of its own, and take all of them for new.
        raise UsageError(
            f"stream {stream.name} is a fork, originally of {origin}: "
            f"give its definition the origin {origin!r}, or run it by its name"
        )
    check_follows(catalog, record, definition_of(stream, options), drop)
    return record.definition


def check_follows(
    catalog: Catalog, record: StreamRecord, now: Mapping[str, Any], drop: Sequence[str] = ()
) -> tuple[str, ...]:
    """Check that a definition fits the state of the stream's newest checkpoint.

    Without a checkpoint there is no state, and only the source options must be the same, because they say where input
    begins.

    Args:
        drop: `OPERATOR` or `OPERATOR.VARIABLE` whose state to give up; `source.NAME` for a source.

    Returns:
        `drop` without what was given up before.

    Raises:
        SchemaConflict, UsageError: see `check_definition` and `drop_state`.
    """
    recorded: Mapping[str, Any] = record.definition
    if not catalog.checkpoints.last_id(record.name):
        recorded = {"operators": {}, **{key: of for key, of in recorded.items() if key not in _OF_STATE}}
    before: dict[str, int] = {}
    if drop or INPUTS in now or INPUTS in recorded:
        before = {name: one.checkpoint for one in catalog.definitions.list(record.name) for name in one.dropped}
    for name in _source_names(now):
        if (at := before.get(f"{SOURCE}.{name}")) is not None:
            raise UsageError(
                f"source {name} of stream {record.name} was given up at checkpoint {at}: give it another name, because "
                "the stream would go on where that one had been read"
            )
    left, dropped = drop_state(record.name, recorded, now, drop, before)
    check_definition(record.name, left, now)
    return dropped


def _source_names(definition: Mapping[str, Any]) -> list[str]:
    """Return the names of the sources in the definition of some code."""
    return list(definition.get(INPUTS, (SOURCE,)))


def drop_state(
    name: str, recorded: Mapping[str, Any], now: Mapping[str, Any], drop: Sequence[str], before: Container[str] = ()
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Remove dropped operators, variables and sources from a recorded definition; return it, and what was removed.

    Args:
        before: what was dropped at earlier checkpoints, which may be named again.

    Raises:
        UsageError: no operator, variable or source of that name is recorded, or the code still has it.
    """
    operators = {
        operator: {**one, "variables": dict(one["variables"])} for operator, one in recorded["operators"].items()
    }
    inputs, dropped = dict(_inputs(recorded)), []
    for what in dict.fromkeys(drop):
        operator, _, variable = what.partition(".")
        there = now["operators"].get(operator, {"variables": {}})
        is_read = operator == SOURCE and variable in _source_names(now)
        if is_read or variable in there["variables"] or (operator in now["operators"] and not variable):
            raise UsageError(f"stream {name} still has {what} in its code: remove it there before it is dropped")
        held = operators.get(operator, {"variables": {}})
        if operator == SOURCE and variable in inputs:
            del inputs[variable]
        elif variable in held["variables"]:
            del held["variables"][variable]
        elif operator in operators and not variable:
            del operators[operator]
        elif what in before:
            continue
        else:
            known = list(recorded["operators"])
            known += [f"{o}.{v}" for o, one in recorded["operators"].items() for v in one["variables"]]
            known += [f"{SOURCE}.{source}" for source in recorded.get(INPUTS, ())]
            raise UsageError(f"stream {name} has no {what} to drop: it has {', '.join(known) or 'no state yet'}")
        dropped.append(what)
    left = {key: of for key, of in recorded.items() if key not in _OF_STATE}
    return {**left, "operators": operators, INPUTS: inputs}, tuple(dropped)


def check_definition(name: str, recorded: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check that a definition fits the recorded one.

    New operators, variables and value columns are allowed: they are empty or null at first. So are new sources. Key
    columns may become nullable. Any other change would leave state or input that nothing reads, or misread state.

    Raises:
        SchemaConflict: they do not fit; the message has both schemas.
        UsageError: the source options differ, so that input would be read twice or not at all.
    """
    secret = now.get(SECRET, ())
    options = {option: value for option, value in recorded["options"].items() if option not in secret}
    if options != now["options"]:
        # Not their values: an option may have been recorded before it was marked as secret.
        other = sorted(o for o in {*options, *now["options"]} if options.get(o) != now["options"].get(o))
        raise UsageError(
            f"stream {name} was started with other values of the source options {', '.join(other)}: "
            "use the same, or start a stream of another name"
        )
    for source, _ in _inputs(recorded):
        if source not in _source_names(now):
            raise SchemaConflict(
                f"stream {name} lost source {source}: its sources are {', '.join(_source_names(now))}",
                advice=_way_out(name, f"{SOURCE}.{source}", "it"),
            )
    for operator, old in recorded["operators"].items():
        new = now["operators"].get(operator)
        if new is None:
            raise SchemaConflict(
                f"stream {name} lost operator {operator}: recorded {old}, now there is only {now['operators']}",
                advice=_way_out(name, operator),
            )
        _check_operator(name, operator, old, new)


def _check_operator(stream: str, operator: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    what = f"{stream}/{operator}"
    if not key_follows(new["key"], old["key"]):
        raise SchemaConflict(f"{what} changed its key: recorded {old['key']}, now {new['key']}")
    for name, variable in old["variables"].items():
        now = new["variables"].get(name)
        if now is None:
            raise SchemaConflict(
                f"{what}.{name} changed: recorded {variable}, now {{'kind': 'missing'}}",
                advice=_way_out(stream, f"{operator}.{name}"),
            )
        if now["kind"] != variable["kind"]:
            raise SchemaConflict(f"{what}.{name} changed: recorded {variable}, now {now}")
        for table, shape in variable["tables"].items():
            TableSchema.from_json(now["tables"][table]).check_follows(TableSchema.from_json(shape), f"{what}.{table}")


def _way_out(stream: str, what: str, given_up: str = "its state") -> str:
    return (
        f"run the code that has it, or give {given_up} up (siltstone run {stream} --drop {what}), or go on from a "
        f"checkpoint that does not hold it (siltstone fork {stream} NEW --at ID)"
    )
