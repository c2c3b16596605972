"""What is kept of a stream: chains and their materialization, retention, savepoints, sweeping."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from siltstone.client.opened import ignore, opened
from siltstone.errors import UsageError
from siltstone.listings import (
    DeletionList,
    Retention,
    Savepoint,
    SavepointDropped,
    SavepointList,
)
from siltstone.model import LATEST, check_name
from siltstone.settings import Settings

if TYPE_CHECKING:
    from siltstone.retention.deletion import DeletionResult
    from siltstone.retention.sweep import SweepResult
    from siltstone.retention.truncate import Truncation
    from siltstone.spark.operations import (
        MaterializeResult,
    )
    from siltstone.stream import Stream


class StreamStorage:
    """The methods of `StreamClient` that keep chains short and stores clean."""

    def __init__(self, settings: Settings, stream: "str | Stream") -> None:
        self.settings: Settings = settings
        self.name: str = stream if isinstance(stream, str) else stream.name
        check_name("stream", self.name)

    def materialize(
        self,
        *,
        at: str = LATEST,
        operators: Sequence[str] = (),
        due: bool = False,
        on_operator: Callable[[str], None] = ignore,
    ) -> "MaterializeResult":
        """Consolidate a checkpoint's chains into new bases, while the stream may run.

        Args:
            operators: only these.
            due: of these, only those for which it is time, as the settings say.
            on_operator: called with each as its turn comes.
        """
        if due and at != LATEST:
            raise UsageError("due and at exclude each other: leave one out")
        from siltstone.spark import operations

        return operations.materialize(
            self.settings, self.name, at=at, operators=operators, due=due, on_operator=on_operator
        )

    def truncate(self, *, dry_run: bool = False) -> "Truncation":
        """Delete the checkpoints that retention does not keep, and what only they need.

        The rules are those of the settings (`siltstone.open(..., retention={"keep_last": 10})`), or else those recorded
        with the stream.

        Args:
            dry_run: only say what would be done.
        """
        from siltstone.retention.truncate import truncate

        with opened(self.settings) as place:
            return truncate(place, self.name, self.settings.retention, dry_run=dry_run)

    def retention(self, rules: Mapping[str, Any] | None = None) -> Retention:
        """Say what the stream keeps; with `rules`, record those with it first, in place of what was recorded.

        Args:
            rules: such as `{"keep_last": 500, "keep_daily": 7}` or `{"keep_all": True}`.
        """
        from siltstone.retention.retention_rules import RetentionOptions
        from siltstone.retention.truncate import describe_retention

        with opened(self.settings) as place:
            if rules:
                place.catalog.streams.set_retention(self.name, RetentionOptions.model_validate(rules).to_record())
            found = describe_retention(place.catalog, self.name, self.settings.retention)
        return Retention(self.name, found["recorded"], found["in_force"], found["from"], found["described"])

    def delete(self, checkpoints: Sequence[int]) -> "DeletionResult":
        """Delete checkpoints, but not the newest. One that others build on is marked, and goes with the last of them.

        Raises:
            UsageError: one of them has a savepoint, or is the newest; nothing is deleted.
        """
        from siltstone.retention.deletion import delete_checkpoints
        from siltstone.retention.retention_rules import retention_in_force

        with opened(self.settings) as place:
            rules = retention_in_force(place.catalog.streams.get(self.name).retention, self.settings.retention)
            return delete_checkpoints(place, self.name, checkpoints, input_log=rules.input_log)

    def deletions(self, limit: int | None = None) -> DeletionList:
        """List what was deleted from the stream in the last 90 days, by hand or automatically, and by whom."""
        from siltstone.chains.inspect import list_deletions

        with opened(self.settings) as place:
            return DeletionList(self.name, list_deletions(place.catalog, self.name, limit))

    def sweep(
        self,
        *,
        dry_run: bool = False,
        limit: int | None = None,
        incomplete: bool = False,
        age_guard: str = "3d",
        who: str | None = None,
    ) -> "SweepResult":
        """Delete stored objects that nothing refers to: of runs that were killed, and of attempts that lost.

        Args:
            dry_run: only say what would be deleted and why.
            limit: delete at most so many objects.
            incomplete: look only where checkpoints did not complete.
            age_guard: how old what a run may be writing must be: 12h, 3d or 1w.
            who: recorded with each deletion; None for this process.
        """
        from siltstone.retention.retention_rules import parse_duration
        from siltstone.retention.sweep import SweepOptions, sweep

        options = SweepOptions(limit, dry_run, incomplete, parse_duration(age_guard))
        with opened(self.settings) as place:
            return sweep(place, self.name, options, who)

    # Savepoints

    def savepoint(self, name: str, *, at: str = LATEST, expires: str | None = None) -> Savepoint:
        """Give a checkpoint a name, which keeps it from deletion.

        Args:
            expires: keep it for 12h, 30d or 4w only; None until the name is dropped.

        Raises:
            UsageError: not a savepoint's name, or one that is taken.
        """
        from siltstone.retention import savepoints
        from siltstone.retention.retention_rules import parse_duration

        expires_in = None if expires is None else parse_duration(expires)
        with opened(self.settings) as place:
            made = savepoints.set_savepoint(place.catalog, self.name, name, at=at, expires_in=expires_in)
            return Savepoint(self.name, **savepoints.describe_savepoint(place.catalog, made))

    def drop_savepoint(self, name: str) -> SavepointDropped:
        """Forget a savepoint. Its checkpoint stays until retention or somebody deletes it.

        Raises:
            UsageError: there is no savepoint of that name.
        """
        from siltstone.retention import savepoints

        with opened(self.settings) as place:
            savepoints.drop_savepoint(place.catalog, self.name, name)
        return SavepointDropped(self.name, name)

    def savepoints(self) -> SavepointList:
        """List the savepoints, expired ones too."""
        from siltstone.retention.savepoints import list_savepoints

        with opened(self.settings) as place:
            return SavepointList(self.name, list_savepoints(place.catalog, self.name))
