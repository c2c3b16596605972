"""Decide how much of the log travels with acknowledgements and tasks instead of lying in the store, in total.

task to driver    small segments and small outputs, in acknowledgements; the driver collects those of a step at once
driver to task    where the changes of the interval are, and those that are not stored yet: every task of an
                  operator carries those of all its subtasks, since Spark sends them one and the same task
"""

STEP_BYTES = 8 << 20
"""most bytes that the acknowledgements of a step carry inline, together"""
SENT_BYTES = 1 << 20
"""small segments under way to the store above which the driver waits for them, so that later tasks carry handles"""
INTERVAL_BYTES = 4 << 20
"""compressed handles of an interval, of the operator with most of them, above which the interval ends"""


def inline_limit_bytes(option_bytes: int, subtasks: int, parts: int) -> int:
    """Return how many bytes each part of an acknowledgement may carry inline.

    Args:
        option_bytes: the limit that the options give (`UploadOptions.inline_bytes`).
        subtasks: acknowledgements of one operator.
        parts: what may be inline for one subtask of each operator: its changes, each of its outputs.
    """
    return min(option_bytes, STEP_BYTES // max(1, subtasks * parts))


def waits_for_upload(sent_bytes: int) -> bool:
    """Return whether the driver waits until these segments are stored, so that tasks do not carry them."""
    return sent_bytes > SENT_BYTES


def ends_interval(carried_bytes: int) -> bool:
    """Return whether tasks carry too many bytes of handles, so that the interval must end in a checkpoint."""
    return carried_bytes > INTERVAL_BYTES
