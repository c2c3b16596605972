"""How far a recovery may go back without being asked: one pure rule, for runs, jobs and the command line.

What is given up comes again from the input log. But where much of a stream seems lost, it is more likely that the store
answers wrongly than that so many checkpoints are damaged; and what people made by hand does not come again. Then people
decide.
"""

from collections.abc import Sequence

AUTOMATIC_CHECKPOINTS = 3
"""the most checkpoints that are given up without being asked"""


def explain_refusal(newest: int, checkpoint: int, savepoints: Sequence[str], edits: Sequence[int]) -> str | None:
    """Why going back may not happen by itself; None if it may.

    Args:
        newest: the newest checkpoint.
        checkpoint: the one to go back to; 0 is before the first.
        savepoints: names that would be lost.
        edits: checkpoints that would be lost and hold an edit by hand, which no input brings back.
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
