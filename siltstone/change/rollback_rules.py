"""How far a recovery may go back by itself: one pure rule for runs, jobs and the command line.

Checkpoints that are given up are made again from the input log. But if much of a stream seems lost, it is more likely
that the store answers wrongly; and edits by hand and savepoints are not made again. A person decides then.
"""

from collections.abc import Sequence

AUTOMATIC_CHECKPOINTS = 3
"""most checkpoints that are given up without `--accept-loss`"""


def explain_refusal(newest: int, checkpoint: int, savepoints: Sequence[str], edits: Sequence[int]) -> str | None:
    """Say what going back would lose that needs consent; None if it needs none.

    Args:
        newest: the newest checkpoint.
        checkpoint: the one to go back to; 0 is the empty state.
        savepoints: names of the savepoints that would be lost.
        edits: ids of checkpoints with an edit by hand that would be lost; no input brings it back.
    """
    reasons = []
    if newest > checkpoint == 0:
        reasons.append("the whole stream")
    if newest - checkpoint > AUTOMATIC_CHECKPOINTS:
        reasons.append(f"more than {AUTOMATIC_CHECKPOINTS} checkpoints")
    if savepoints:
        reasons.append(f"savepoint {', '.join(savepoints)}")
    if edits:
        reasons.append(f"the edit at checkpoint {', '.join(map(str, edits))}")
    return ", ".join(reasons) or None
