"""Every error Siltstone raises on purpose, as one tree.

    SiltstoneError            exit code
    |- UsageError                 2   bad option, name, definition or input
    |  |- UnknownStream           2
    |  |- UnknownCheckpoint       2
    |  |- SchemaConflict          2   a stream's definition changed in a way its state cannot follow
    |  |- BadRow                  2   a source row the stream cannot take (such as a null key)
    |  |- WrongWarehouse          2   the store and the catalog do not belong together
    |  |- LossRefused             2   a recovery would give up more than it may without being asked
    |  '- NewerFormat             2   a newer Siltstone wrote the object; it is not damaged
    |- StateError                 1   state that is not what it should be
    |  |- CorruptObject           1   a stored object is missing, cut or altered
    |  |- NoLiveState             1   a checkpoint's live state is not, or no longer, on this machine
    |  |- LostWorkingState        1   a machine lost the working state of steps that are in no checkpoint
    |  |- InputChanged            1   a logged step that is run again reads, or makes, other rows than before
    |  '- ProofFailed             1   a restore's digest differs from the recorded one
    |- Unreachable                3   the store or the catalog cannot be reached, read or written
    |  '- ObjectExists            3   a write-once object already exists
    |- Fenced                     4   a newer writer epoch has taken the stream over
    '- Stopped                130, 143   SIGINT or SIGTERM ended a run, with a checkpoint, before its input did

Messages are one line, name the thing at fault, and say what to do. A `UsageError` says that in its message: what is
wrong, and what to give instead. Most other classes have general advice; a raise that knows better gives `advice=`.
Command lines and Dagster show `SiltstoneError.full_text`, which has both.
"""

import signal
from typing import Any, ClassVar


def summarize(error: BaseException) -> str:
    """Describe any error on one line: `OSError: No space left on device`."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


class SiltstoneError(Exception):
    """Root of the tree. `exit_code` is what the command line ends with.

    Args:
        message: what is wrong; of a class without general advice, also what to do.
        advice: what to do about it, in place of the class's general advice.
    """

    exit_code = 1
    general_advice: ClassVar[str] = "run the same command again, and report it if it fails again (--log-level debug)"
    """what to do about errors that were raised without advice; "" if messages of the class say it themselves"""

    def __init__(self, message: str, *, advice: str = "") -> None:
        super().__init__(f"{message}; {advice}" if advice else message)
        self.message: str = message
        self.advice: str = advice

    @property
    def full_text(self) -> str:
        """The message, and what to do."""
        said = str(self)
        return said if self.advice or not self.general_advice else f"{said.rstrip('.')}; {self.general_advice}"


class UsageError(SiltstoneError):
    """The caller asked for something that cannot be done; nothing was changed."""

    exit_code = 2
    general_advice = ""


class UnknownStream(UsageError):
    """No stream of this name is defined, or none has run in this warehouse."""


class UnknownCheckpoint(UsageError):
    """No completed checkpoint has this id, or none is as old as this time."""


class SchemaConflict(UsageError):
    """The stream's definition no longer fits its recorded state; the message shows both schemas."""

    general_advice = "restore the definition as it was, or give the stream a new name"


class BadRow(UsageError):
    """Rows that an operator cannot take, such as those with a null key.

    An operator's `process` may raise it as well. If the stream has `on_bad_row="dead-letter"`, the rows in `rows`
    become dead letters, and the step goes on without them; name all bad rows of a call at once.

    Args:
        message: what is wrong.
        advice: what to do about it, in place of the general advice.
        rows: bool[n], which of the rows of this call of `process` are bad; None if that is not known: then the step
            fails.
        reason: what a dead letter says; by default the message.
        keys: uint64[n], if `rows` marks entries of a state table instead of rows of the call: the hash of each
            entry's operator key. Unless the entries are the call's rows, all rows of the bad keys are bad.
        at: what the entries were addressed by: ordinals of keys, or a table of the operator's key columns. If that
            is `Rows.key_index`, or the key columns of `Rows.table`, the entries are the call's rows.
    """

    general_advice = 'correct the rows in the source, or let the stream set them aside (on_bad_row="dead-letter")'

    def __init__(
        self,
        message: str,
        *,
        advice: str = "",
        rows: Any = None,
        reason: str | None = None,
        keys: Any = None,
        at: Any = None,
    ) -> None:
        super().__init__(message, advice=advice)
        self.rows: Any = rows
        self.reason: str = reason or message
        self.keys: Any = keys
        self.at: Any = at


class WrongWarehouse(UsageError):
    """The store and the catalog do not belong together, or one is older; the message says what to check."""


class LossRefused(UsageError):
    """A recovery would give up more than it may without being asked; nothing was given up.

    The message says what would be lost, why, and the command that accepts the loss.
    """


class NewerFormat(UsageError):
    """An object is intact, but in a format that only a newer Siltstone reads."""


class StateError(SiltstoneError):
    """Stored or working state is not what the catalog says it is."""

    general_advice = "run the stream again: it resumes from its newest checkpoint, and recovers if that is damaged"


class CorruptObject(StateError):
    """A stored object is missing, cut short or altered; the message names it."""

    general_advice = "restore an older checkpoint, or recover the stream (`siltstone recover STREAM`)"


class NoLiveState(StateError):
    """This machine does not have a checkpoint's live state, or not at this moment."""

    general_advice = "run the stream here, then try again"


class LostWorkingState(StateError):
    """The working state of steps that are in no checkpoint is gone, so these steps have to come again."""


class InputChanged(StateError):
    """A logged step is run again, and its input, or what operators make of it, is not what it was."""

    general_advice = (
        "bring the source's data back as they were, or give up the logged steps, so that sinks get the rows of the "
        "same input again under new ids (`siltstone recover STREAM --accept-loss`)"
    )


class ProofFailed(StateError):
    """A restored state's digest differs from the one recorded at its checkpoint."""

    general_advice = "restore an older checkpoint, or recover the stream (`siltstone recover STREAM`)"


class Unreachable(SiltstoneError):
    """The store or the catalog cannot be reached, read or written.

    `transient`: the same call may succeed a little later, as after a time-out or a throttling answer.
    """

    exit_code = 3
    general_advice = ""

    def __init__(self, message: str, *, advice: str = "", transient: bool = False) -> None:
        super().__init__(message, advice=advice)
        self.transient = transient


class ObjectExists(Unreachable):
    """A write-once object of this name is already stored."""

    general_advice = "run the same command again: it uses other names"


class Fenced(SiltstoneError):
    """A newer writer epoch owns the stream: this one may commit nothing and delete nothing."""

    exit_code = 4
    general_advice = ""


class Stopped(SiltstoneError):
    """A signal ended a run before its input did. The run took a last checkpoint; the next run continues from there.

    Args:
        stream: the stream that ran.
        signal_name: SIGINT or SIGTERM.
        completed: its newest checkpoint, 0 for none.
    """

    general_advice = ""

    def __init__(self, stream: str, signal_name: str, completed: int) -> None:
        at = f"checkpoint {completed} is complete" if completed else "no checkpoint was begun"
        super().__init__(f"{stream} was stopped by {signal_name}, and {at}: run it again to go on")
        self.exit_code: int = 128 + signal.Signals[signal_name]
