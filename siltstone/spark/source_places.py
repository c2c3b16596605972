"""Where Spark has each source of a query: its record has offsets in order, and logs in numbered directories."""

from collections.abc import Mapping, Sequence

from siltstone.catalog.records.source_entries import (
    NAMED,
    NO_OFFSET,
    decode_offsets,
    encode_offsets,
    header_of,
    name_of_log,
    number_of,
)
from siltstone.catalog.records.steps import Step
from siltstone.errors import StateError, UsageError

_BY_SPARK = "v2\n"


class SourcePlaces:
    """Turns recorded steps into what Spark reads, and back.

    Args:
        names: per source of Spark's query, in order, what the record calls it; one that is used twice is there twice.
            None for a query whose steps are recorded as Spark writes them.
    """

    def __init__(self, names: Sequence[str] | None) -> None:
        self.names = names
        self._directories = list(dict.fromkeys(names or ()))
        """Spark numbers the logs of the sources by their first use"""

    def check_form(self, step: Step) -> None:
        """Check that a step's record fits the form of the query's.

        Raises:
            UsageError: Spark named the sources itself.
        """
        if self.names is not None and step.offsets.startswith(_BY_SPARK):
            raise UsageError(
                f"step {step.step} is recorded with Spark's own names for its sources, and now the stream names them: "
                "run it with its one source as before, or start a stream of another name"
            )

    def has(self, name: str) -> bool:
        """Whether the query has a source of a name in the record."""
        return number_of(name) is not None if self.names is None else name in self.names

    def directory_of(self, step: Step, log: str) -> str | None:
        """Return the directory of the entries that a step has under `log`; None if the query does not have the
        source."""
        name = name_of_log(step.offsets, log)
        if self.names is not None:
            return str(self._directories.index(name)) if name in self._directories else None
        if step.offsets.startswith(_BY_SPARK):
            return log
        number = number_of(name)
        if number is None:
            return None if step.offsets.startswith(f"{NAMED}\n") else log
        return str(number)

    def log_of(self, directory: str) -> str:
        """Return under which name a directory's entries are recorded."""
        if self.names is None:
            return directory
        if not directory.isdecimal() or int(directory) >= len(self._directories):
            raise self._other_sources_error()
        return self._directories[int(directory)]

    def offsets_for_spark(self, step: Step, before: Mapping[str, str]) -> str:
        """Return a step's offsets as Spark's log has them: in the order of the query's sources.

        A source of which the step does not tell stays where it was before, so the step has read nothing of it.

        Args:
            before: source -> up to where the steps before have read it, or where it begins if none has; `NO_OFFSET` if
                it has no offset there.
        """
        is_named = step.offsets.startswith(f"{NAMED}\n")
        if self.names is None and not is_named:
            return step.offsets
        recorded = decode_offsets(step.offsets)
        if self.names is None:
            names = sorted(filter(self.has, {**before, **recorded}), key=lambda name: number_of(name) or 0)
        else:
            names = self.names
            if not is_named:  # by place, of the source that had no name: it may use one twice
                own = [name for name in names if number_of(name) is not None]
                recorded = dict(zip(own, recorded.values(), strict=False)) | recorded
        return "\n".join(
            ["v1", header_of(step.offsets), *({**before, **recorded}.get(name, NO_OFFSET) for name in names)]
        )

    def offsets_to_record(self, offsets: str, before: Mapping[str, str]) -> str:
        """Return the offsets of a batch in Spark's log as they are recorded.

        Sources that the query does not have are recorded with them: if the stream is rolled back over their removal,
        this step may be run again by code that has them, and must leave them where they are.

        Args:
            before: source -> up to where the batches before have read it, of those that have been read.

        Raises:
            UsageError: Spark writes them in a version in which it names the sources.
            StateError: they are of other sources than the query's.
        """
        others = [(name, offset) for name, offset in before.items() if not self.has(name)]
        if self.names is None:
            if not others or not offsets.startswith("v1\n"):  # a later version has Spark's own names
                return offsets
            return encode_offsets(f"{NAMED}\n{header_of(offsets)}", [*decode_offsets(offsets).items(), *others])
        version, header, *lines = offsets.rstrip("\n").split("\n")
        if version != "v1":
            raise UsageError(
                f"the stream names its sources, and Spark would name them, too ({version}): set "
                "spark.sql.streaming.offsetLog.formatVersion to 1"
            )
        if len(lines) != len(self.names):
            raise self._other_sources_error()
        return encode_offsets(f"{NAMED}\n{header}", [*zip(self.names, lines, strict=True), *others])

    def _other_sources_error(self) -> StateError:
        return StateError(
            f"the query does not have the sources {', '.join(self._directories)}, in this order",
            advice="run the stream by siltstone.write_stream, or by its own sources",
        )
