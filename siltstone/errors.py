"""Every error Siltstone raises on purpose, as one tree.

    SiltstoneError            exit code
    |- UsageError                 2   bad option, name, definition or input
    |  |- UnknownStream           2
    |  |- UnknownCheckpoint       2
    |  |- SchemaConflict          2   a stream's definition changed in a way its state cannot follow
    |  |- BadRow                  2   a source row the stream cannot take (null key)
    |  |- WrongWarehouse          2   the store and the catalog do not belong together
    |  |- LossRefused             2   a recovery would give up more than it may without being asked
    |  '- NewerFormat             2   a newer Siltstone wrote the object; it is no damage
    |- StateError                 1   state that is not what it should be
    |  |- CorruptObject           1   a stored object is missing, cut or altered
    |  |- NoLiveState             1   a checkpoint's live state is not on this machine, or not any more
    |  '- ProofFailed             1   a restore's digest differs from the recorded one
    |- Unreachable                3   the store or the catalog cannot be reached, read or written
    |  '- ObjectExists            3   a write-once object is already there
    |- Fenced                     4   a newer writer epoch has taken the stream over
    '- Stopped                130, 143   SIGINT or SIGTERM ended a run, with a checkpoint, before its input did

Messages are one line, name the thing at fault, and say what to do.
"""

import signal
from typing import Any


class SiltstoneError(Exception):
    """Root of the tree. `exit_code` is what the command line ends with."""

    exit_code = 1


class UsageError(SiltstoneError):
    """The caller asked for something that cannot be done; nothing was changed."""

    exit_code = 2


class UnknownStream(UsageError):
    """No stream of that name is defined, or none has run in this warehouse."""


class UnknownCheckpoint(UsageError):
    """No completed checkpoint answers to that id or time."""


class SchemaConflict(UsageError):
    """The stream's definition no longer fits its recorded state; the message shows both schemas."""


class BadRow(UsageError):
    """Rows that an operator cannot take, such as those with a null key.

    An operator's `process` may raise it as well. Where the stream has `on_bad_row="dead-letter"`, the rows that it
    names become dead letters, and the step goes on without them; all bad rows of a call are best named at once.

    Args:
        message: what is wrong and what to do.
        rows: bool[n], which of the rows of this call of `process` are bad; None if that is not known: then the step
            fails.
        reason: what a dead letter says, without the advice; the message if it is not given.
        keys: uint64[n], where `rows` is about entries of a table of state and not about rows of the call: the hash of
            the operator key of each entry. Unless the entries are the call's rows, all rows of the bad keys are.
        at: the ordinals that these entries were given with; if that is `Rows.group`, they are the call's rows.
    """

    def __init__(
        self, message: str, *, rows: Any = None, reason: str | None = None, keys: Any = None, at: Any = None
    ) -> None:
        super().__init__(message)
        self.rows, self.reason, self.keys, self.at = rows, reason or message, keys, at


class WrongWarehouse(UsageError):
    """The store and the catalog do not belong together, or are of different times; the message says what to check."""


class LossRefused(UsageError):
    """A recovery would give up more than it may without being asked; nothing was given up. The message says what would
    be lost, why, and the command that accepts it."""


class NewerFormat(UsageError):
    """An object is whole, but of a format that only a newer Siltstone reads: upgrade. It is no damage."""


class StateError(SiltstoneError):
    """Stored or working state is not what the catalog says it is."""


class CorruptObject(StateError):
    """A stored object is missing, cut short or altered; the message names it."""


class NoLiveState(StateError):
    """This machine does not have the live state of a checkpoint, or not at this moment."""


class ProofFailed(StateError):
    """A restored state's digest differs from the one recorded at its checkpoint."""


class Unreachable(SiltstoneError):
    """The store or the catalog cannot be reached, read or written.

    `transient`: the same call may well succeed a little later, as after a time-out or a throttling answer.
    """

    exit_code = 3

    def __init__(self, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.transient = transient


class ObjectExists(Unreachable):
    """A write-once object of that name is already stored."""


class Fenced(SiltstoneError):
    """A newer writer epoch owns the stream: this one may commit nothing and delete nothing."""

    exit_code = 4


class Stopped(SiltstoneError):
    """A signal ended a run before its input did. What it had begun is completed: the next run goes on from there.

    Args:
        stream: the stream that ran.
        signal_name: SIGINT or SIGTERM.
        completed: its newest checkpoint, 0 for none.
    """

    def __init__(self, stream: str, signal_name: str, completed: int) -> None:
        at = f"checkpoint {completed} is complete" if completed else "no checkpoint was begun"
        super().__init__(f"{stream} was stopped by {signal_name}, and {at}: run it again to go on")
        self.exit_code = 128 + signal.Signals[signal_name]
