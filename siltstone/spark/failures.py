"""What failed inside Spark, in one line for people."""

from siltstone.run.processing import OperatorFailed

WORKER_DIED = ("Python worker exited unexpectedly", "java.net.SocketException", "java.io.EOFException")
"""what Spark says when the process that ran a task is gone"""


def explained(error: BaseException, again: str) -> str:
    """One line about what failed inside Spark: the user's own error, or the last that Spark tells of.

    Args:
        again: what to do again where a worker died.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    users = [line.partition(f"{OperatorFailed.__name__}: ")[2] for line in lines if OperatorFailed.__name__ in line]
    errors = [line for line in lines if "Error" in line or "Exception" in line]
    said = ([line for line in users if line] or errors[-1:] or lines or ["no message"])[0]
    if any(sign in line for line in lines for sign in WORKER_DIED):
        return f"a Python worker died, killed or out of memory ({said}); {again} again to resume"
    return said
