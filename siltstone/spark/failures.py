"""Describe a failure inside Spark in one line."""

from siltstone.run.processing import OperatorFailed

WORKER_DIED = ("Python worker exited unexpectedly", "java.net.SocketException", "java.io.EOFException")
"""texts of Spark's errors when the process that ran a task has ended"""


def explain(error: BaseException, action: str) -> str:
    """Describe an error of Spark in one line: the user's own error, or else the last one in Spark's message.

    Args:
        action: what to repeat if a worker died, such as "run the stream".
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    users = [line.partition(f"{OperatorFailed.__name__}: ")[2] for line in lines if OperatorFailed.__name__ in line]
    errors = [line for line in lines if "Error" in line or "Exception" in line]
    said = ([line for line in users if line] or errors[-1:] or lines or ["no message"])[0]
    if any(sign in line for line in lines for sign in WORKER_DIED):
        return f"a Python worker died, killed or out of memory ({said}); {action} again to resume"
    return said
