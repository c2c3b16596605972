"""Describe a failure inside Spark in one line, and judge whether it may pass."""

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException, StreamingQueryException

from siltstone.errors import LostWorkingState, SiltstoneError, StateError, Unreachable, summarize
from siltstone.run.users_code import OperatorFailed
from siltstone.spark.step import LOST_OUTPUT

WORKER_DIED = ("Python worker exited unexpectedly", "java.net.SocketException", "java.io.EOFException")
"""texts of Spark's errors when the process that ran a task has ended"""
LOST = (
    *("ExecutorLostFailure", "FetchFailed", "MetadataFetchFailed", "BlockNotFoundException", "Executor heartbeat"),
    *("TimeoutError: another process has used", LOST_OUTPUT),
)
"""texts of Spark's errors when a machine, an executor, or what it kept is gone or busy"""
_CAUSE, _FRAME = "Caused by: ", "at "
"""how Java begins the line of an error's cause, and one of its stack, which may name a class such as SparkErrorUtils"""


def may_pass(error: BaseException) -> bool:
    """Whether the steps since the newest checkpoint may succeed if they are run again.

    True if the store or the catalog could not be reached, working state is gone, or a process or machine that ran tasks
    is. False for errors of the user's code, the input or stored objects, which would come again.
    """
    if isinstance(error, Unreachable | LostWorkingState):
        return True
    if isinstance(error, SiltstoneError):
        cause = error.__cause__  # such as the failure of a sink's job; a query's failure repeats the error itself
        if type(error) is not StateError or not isinstance(cause, PySparkException | Py4JError):
            return False
        if isinstance(cause, StreamingQueryException):
            return False
        error = cause
    said = str(error)
    is_users = isinstance(error, OperatorFailed) or OperatorFailed.__name__ in said
    return not is_users and any(sign in said for sign in (*WORKER_DIED, *LOST))


def describe(error: BaseException) -> str:
    """Describe an error that may be of Spark, or of code that used it, in one line."""
    return explain(error) if isinstance(error, PySparkException | Py4JError) else summarize(error)


def explain(error: BaseException) -> str:
    """Describe an error of Spark in one line: the user's own error, or else the last one in Spark's message."""
    lines = [line.strip().removeprefix(_CAUSE) for line in str(error).splitlines() if line.strip()]
    users = [line.partition(f"{OperatorFailed.__name__}: ")[2] for line in lines if OperatorFailed.__name__ in line]
    errors = [line for line in lines if ("Error" in line or "Exception" in line) and not line.startswith(_FRAME)]
    said = ([line for line in users if line] or errors[-1:] or lines or ["no message"])[0]
    if not users and any(sign in line for line in lines for sign in WORKER_DIED):
        return f"a Python worker died, killed or out of memory ({said})"
    return said
