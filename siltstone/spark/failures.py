"""Describe a failure inside Spark in one line, and judge whether it may pass.

Java's errors are a chain of causes, each with a class; Spark's own name a condition and parameters, such as the file
that could not be read. The text of an error is looked into only where it has no class of its own, because an input
file, or a user, may say anything.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException, StreamingQueryException

from siltstone.errors import LostWorkingState, SiltstoneError, StateError, Unreachable, summarize
from siltstone.run.users_code import OperatorFailed
from siltstone.spark.step import LOST_OUTPUT

_ENDED = ("java.io.EOFException", "java.net.SocketException")
"""what ends the connection to a process that has died"""
_PYTHON = ("org.apache.spark.api.python.", "org.apache.spark.sql.execution.python.")
"""where Spark waits for its Python workers"""
_PROXY = "py4j."
"""errors of Python code that Java called"""
_NETWORK = tuple(
    f"java.net.{name}Exception" for name in ("Connect", "NoRouteToHost", "Socket", "SocketTimeout", "UnknownHost")
)
"""errors of connections"""
_CHANNEL = "sun.nio.ch.Socket"
"""where Java reads and writes connections since it has channels, whose errors have no class of their own"""
_PIPE = "java.io.DataOutputStream"
"""where it writes to the pipe by which Spark tells the process that its Python workers are forked from to end one"""
_GONE = ("FetchFailedException", "MetadataFetchFailedException", "BlockNotFoundException")
"""errors when what a machine or an executor kept is gone"""
_SPARK = "org.apache.spark.SparkException"
_LOST = ("ExecutorLostFailure", "FetchFailed", "Executor heartbeat")
"""what Spark's scheduler says when it gives up a job for a machine or an executor, for which it has no class"""
_OURS = ("TimeoutError: another process has used", LOST_OUTPUT)
"""errors of our own that passed through Spark"""
_EATEN = "org.apache.spark.sql.kafka010.KafkaIllegalStateException"
"""error of Kafka's source if a topic no longer has what is to be read"""
_EATEN_BEFORE = ("org.apache.spark.sql.kafka010.", "java.lang.IllegalStateException")
"""the same of Spark 3.5: where it is thrown, and which it is"""
KEEP_INPUT = (
    "it is the same at each try: the state is whole (`siltstone restore`), but the stream goes on only from records "
    "that are there, so let topics keep them (retention.ms) for as long as you may go back, or leave the stream stopped"
)
"""what to do about input that is gone"""
_PATHS = ("path", "filePath")
_DECODERS = (
    "com.fasterxml.jackson.",
    "com.github.luben.zstd.",
    "com.google.protobuf.",
    "com.univocity.parsers.",
    "io.airlift.compress.",
    "net.jpountz.",
    "org.apache.avro.",
    "org.apache.commons.compress.",
    "org.apache.hadoop.io.compress.",
    "org.apache.orc.",
    "org.apache.parquet.",
    "org.apache.spark.sql.catalyst.",
    "org.apache.spark.sql.execution.datasources.",
    "org.xerial.snappy.",
)
"""what turns the bytes of a file into rows: an error that begins there is one of the bytes"""
_NOT_OF_BYTES = ("org.apache.parquet.crypto.", "org.apache.spark.sql.execution.datasources.FileScanRDD")
"""what is among the decoders, and fails for other reasons: a key that is missing, a file that is gone"""
_LOADERS = ("Codec", "Loader", "Codec$", "Loader$")
"""how classes are called that fail if this machine lacks a codec's native library"""
_JDK = ("java.", "javax.", "jdk.", "sun.", "scala.")
_TRACEBACK = "Traceback (most recent call last):"
_DEEPEST = 16
_FRAMES = 4
_JDK_FRAMES = 16


@dataclass(frozen=True)
class Cause:
    """One error of a chain of Java's.

    Attributes:
        name: its class.
        message: what it says.
        parameters: what Spark filled into its message.
        of_worker: whether it arose where Spark waits for a Python worker.
        thrower: the class that it began in, outside of Java's own.
        of_connection: whether Java's own code that it began in reads or writes a connection, or a pipe to Python.
    """

    name: str
    message: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    of_worker: bool = False
    thrower: str = ""
    of_connection: bool = False

    @property
    def text(self) -> str:
        """The class and the message, or the message alone if it begins with a condition of Spark's."""
        said = next(filter(None, map(str.strip, self.message.splitlines())), "no message")
        return said if said.startswith("[") else f"{self.name.rpartition('.')[2]}: {said}"


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
    if not isinstance(error, PySparkException | Py4JError) or OperatorFailed.__name__ in str(error):
        return False
    return is_lost(read_causes(error)) or any(sign in str(error) for sign in _OURS)


def is_lost(causes: Sequence[Cause]) -> bool:
    """Whether a machine, a process or a connection is what failed; `causes` with the outermost first."""
    if _has_worker_died(causes) or any(cause.of_connection for cause in causes):
        return True
    if any(cause.name in _NETWORK or cause.name.endswith(_GONE) for cause in causes):
        return True
    return [cause.name for cause in causes] == [_SPARK] and any(sign in causes[0].message for sign in _LOST)


def _has_worker_died(causes: Sequence[Cause]) -> bool:
    if not causes or not (causes[-1].name in _ENDED or causes[-1].of_connection):
        return False
    return causes[-1].thrower.startswith(_PYTHON) or any(cause.of_worker for cause in causes)


def describe(error: BaseException) -> str:
    """Describe an error that may be of Spark, or of code that used it, in one line."""
    return explain(error) if isinstance(error, PySparkException | Py4JError) else summarize(error)


def explain(error: BaseException) -> str:
    """Describe an error of Spark in one line: the user's own error; the file that was being read, and why it could not
    be; that records of Kafka are gone; or else the innermost cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    users = [line.partition(f"{OperatorFailed.__name__}: ")[2] for line in lines if OperatorFailed.__name__ in line]
    if told := [line for line in users if line]:
        return told[0]
    causes = read_causes(error)
    if _has_worker_died(causes):
        return f"a Python worker died, killed or out of memory ({causes[-1].name})"
    if _lacks_input(causes):
        said = causes[-1].text if causes[-1].name != _EATEN else _say_gone(causes[-1])
        return f"Kafka no longer has records that are to be read, and none is passed over: {said}"
    if causes and not causes[-1].of_worker and not causes[-1].name.startswith(_PROXY):
        files = _files(causes)
        return f"{files[0]} cannot be read: {causes[-1].text}" if files else causes[-1].text
    # Of an error in Python, or without one in the JVM, there is only the text: a stack, and then the error.
    rest = str(error).rpartition(_TRACEBACK)[2].splitlines()
    return next((line for line in rest if line.strip() and not line[0].isspace()), lines[0]).strip()


def is_input_gone(error: BaseException) -> bool:
    """Whether a topic of Kafka no longer has the records that were to be read: they were deleted, or it was."""
    return isinstance(error, PySparkException | Py4JError) and _lacks_input(read_causes(error))


def _lacks_input(causes: Sequence[Cause]) -> bool:
    where, before = _EATEN_BEFORE
    return any(c.name == _EATEN or (c.name == before and c.thrower.startswith(where)) for c in causes)


def _say_gone(cause: Cause) -> str:
    """Say what is gone as an error of Kafka's source does, without its advice, of which some is refused here."""
    told = ", ".join(f"{name} {value}" for name, value in sorted(cause.parameters.items()))
    return told or cause.text


def _files(causes: Sequence[Cause]) -> list[str]:
    return [cause.parameters[name] for cause in causes for name in _PATHS if name in cause.parameters]


def find_unreadable(error: BaseException) -> tuple[str, str] | None:
    """Return the file whose content Spark could not read, as Spark names it, and the reason; None if that is not what
    failed, or Spark does not name the file.

    Only an error that begins where bytes are decoded is one of the content. Of others, nobody can list all that say
    nothing of the file: a store or a disk that fails for a while, rights, memory, a library that is missing.
    """
    causes = read_causes(error) if isinstance(error, PySparkException | Py4JError) else []
    return (_files(causes)[0], causes[-1].text) if is_of_content(causes) else None


def is_of_content(causes: Sequence[Cause]) -> bool:
    """Whether what a file holds is what failed; `causes` with the outermost first."""
    if not _files(causes) or is_lost(causes) or any(_is_of_the_jvm(cause.name) for cause in causes):
        return False
    thrower = causes[-1].thrower
    return thrower.startswith(_DECODERS) and not thrower.startswith(_NOT_OF_BYTES) and not thrower.endswith(_LOADERS)


def _is_of_the_jvm(name: str) -> bool:
    """Whether an error of this class is one of the machine that runs code, such as `java.lang.OutOfMemoryError`."""
    return name.endswith("OutOfMemoryError") or (name.startswith("java.lang.") and name.endswith("Error"))


def read_causes(error: BaseException) -> list[Cause]:
    """Read the chain of a Java error, the outermost first; empty if there is none, or the JVM has ended."""
    origin: Any = getattr(error, "_origin", None) or getattr(error, "java_exception", None)
    causes: list[Cause] = []
    try:
        while origin is not None and len(causes) < _DEEPEST:
            stack = [frame.getClassName() for frame in origin.getStackTrace()[:_JDK_FRAMES]]
            of_worker = any(name.startswith(_PYTHON) for name in stack[:_FRAMES])
            thrower = next((name for name in stack if not name.startswith(_JDK)), "")
            java = itertools.takewhile(lambda name: name.startswith(_JDK), stack)
            reaches = (_CHANNEL, _PIPE) if thrower.startswith(_PYTHON) else (_CHANNEL,)
            of_connection = any(name.startswith(reaches) for name in java)
            name, said = origin.getClass().getName(), origin.getMessage() or ""
            causes.append(Cause(name, said, _parameters(origin), of_worker, thrower, of_connection))
            origin = origin.getCause()
    except (Py4JError, OSError):
        return causes
    return causes


def _parameters(origin: Any) -> dict[str, str]:
    """Return what Spark filled into an error's message; nothing for an error that is not Spark's."""
    try:
        return dict(origin.getMessageParameters())
    except Py4JError:
        return {}
