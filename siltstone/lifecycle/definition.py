"""What recorded state depends on in a stream's definition, and which changes of it the state can follow."""

from collections.abc import Mapping
from typing import Any

from siltstone.catalog.repository import Catalog
from siltstone.errors import SchemaConflict, UsageError
from siltstone.state.schema import TableSchema
from siltstone.stream import Stream


def definition_of(stream: Stream, options: Mapping[str, str]) -> dict[str, Any]:
    """The operators' variables with their schemas, and the source options, as JSON.

    Raises:
        UsageError: an option that the stream does not have.
    """
    unknown = sorted(set(options) - set(stream.options))
    if unknown:
        known = ", ".join(sorted(stream.options)) or "none"
        raise UsageError(f"stream {stream.name} has no source option {unknown[0]!r} (it has: {known})")
    return {**stream.definition(), "options": {**stream.options, **options}}


def check_run(stream: Stream, options: Mapping[str, str], parallelism: int) -> None:
    """Refuse what no run of the stream could use, whatever is recorded.

    Raises:
        UsageError: an option that the stream does not have, or more parallelism than key groups.
    """
    check_parallelism(parallelism, stream.max_parallelism)
    definition_of(stream, options)


def check_parallelism(parallelism: int, max_parallelism: int) -> None:
    """Refuse more tasks an operator than there are key groups.

    Raises:
        UsageError
    """
    if not 1 <= parallelism <= max_parallelism:
        raise UsageError(f"parallelism is {parallelism}: use 1 to max_parallelism {max_parallelism}")


def check_recorded(catalog: Catalog, stream: Stream, options: Mapping[str, str]) -> None:
    """Refuse a run that the recorded state cannot follow; a stream that is new here may be anything.

    Raises:
        SchemaConflict, UsageError: see `check_definition`.
        UsageError: it is a fork, and the definition does not say of which stream.
    """
    for record in catalog.streams():
        if record.name == stream.name:
            if record.forked_from is not None and stream.origin != (origin := catalog.lineage(stream.name)[-1]):
                # Its source would prepare files of its own, and take all of them for new.
                raise UsageError(
                    f"stream {stream.name} is a fork that goes back to {origin}: "
                    f"give its definition the origin {origin!r}, or run it by its name"
                )
            check_definition(stream.name, record.definition, definition_of(stream, options))


def check_definition(name: str, recorded: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse a definition that the recorded state cannot follow.

    New operators, new variables and new value columns are fine: they are empty or null so far. Whatever else changes
    would leave state behind that nobody reads, or read it as something it is not.

    Raises:
        SchemaConflict: with both schemas shown.
        UsageError: the source options differ, so that input would be taken twice or not at all.
    """
    if recorded["options"] != now["options"]:
        raise UsageError(
            f"stream {name} was started with the source options {recorded['options']}, not {now['options']}: "
            "use the same, or start a stream of another name"
        )
    for operator, old in recorded["operators"].items():
        new = now["operators"].get(operator)
        if new is None:
            raise SchemaConflict(
                f"stream {name} lost operator {operator}: recorded {old}, now there is only {now['operators']}"
            )
        _check_operator(f"{name}/{operator}", old, new)


def _check_operator(what: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    if old["key"] != new["key"]:
        raise SchemaConflict(f"{what} changed its key: recorded {old['key']}, now {new['key']}")
    for name, variable in old["variables"].items():
        now = new["variables"].get(name, {"kind": "missing", "tables": {}})
        if now["kind"] != variable["kind"]:
            raise SchemaConflict(f"{what}.{name} changed: recorded {variable}, now {now}")
        for table, shape in variable["tables"].items():
            TableSchema.from_json(now["tables"][table]).check_follows(TableSchema.from_json(shape), f"{what}.{table}")
