"""Which failures a run resets itself after, how often, and from whose epoch."""

from dataclasses import replace
from unittest.mock import Mock, patch

import pytest
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException, StreamingQueryException

from siltstone.catalog.epochs import Tenure
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import (
    BadRow,
    CorruptObject,
    Fenced,
    LostWorkingState,
    ProofFailed,
    SchemaConflict,
    StateError,
    Unreachable,
)
from siltstone.retention.retention_rules import NEW_STREAM
from siltstone.run.take_over import take_over
from siltstone.run.users_code import OperatorFailed
from siltstone.settings import RecoveryOptions
from siltstone.spark.failures import Cause, is_input_gone, is_lost, is_of_content, may_pass
from siltstone.spark.resets import Resets
from siltstone.spark.stopping import StopRequest

AWAY = Unreachable("the store is away")


def because(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (AWAY, True),
        (LostWorkingState("gone"), True),
        (PySparkException("TimeoutError: another process has used /srv/state/keys-0 for 60 s"), True),
        (because(StateError("the sink failed"), PySparkException("TimeoutError: another process has used /x")), True),
        (because(StateError("the sink failed"), ZeroDivisionError("another process has used")), False),
        (because(StateError("stopped"), StreamingQueryException("TimeoutError: another process has used /x")), False),
        (PySparkException("OperatorFailed: operator keys: TimeoutError: another process has used"), False),
        (PySparkException("FetchFailed: a message is not looked into"), False),
        (OperatorFailed("operator keys: OSError: java.net.SocketException"), False),
        (ZeroDivisionError("division by zero"), False),
        (because(CorruptObject("altered"), PySparkException("TimeoutError: another process has used")), False),
        *((error, False) for error in (ProofFailed("x"), BadRow("x"), SchemaConflict("x"), Fenced("x"))),
        (KeyboardInterrupt(), False),
    ],
)
def test_only_what_may_pass_resets_a_run(error: BaseException, passes: bool) -> None:
    assert may_pass(error) is passes


FACTORY = "org.apache.spark.api.python.PythonWorkerFactory"


def error_of_java(name: str, said: str, stack: list[str]) -> PySparkException:
    """An error of Spark's whose only cause is of this class, with the classes on its stack."""
    java = Mock(getStackTrace=lambda: [Mock(getClassName=lambda each=each: each) for each in stack])
    java.getClass.return_value.getName.return_value = name
    java.configure_mock(**{"getMessage.return_value": said, "getCause.return_value": None})
    java.getMessageParameters.side_effect = Py4JError("it is not Spark's")
    error = PySparkException(f"{name.rpartition('.')[2]}: {said}")
    error.__dict__["_origin"] = java
    return error


@pytest.mark.parametrize(
    ("name", "thrower", "gone"),
    [
        ("org.apache.spark.sql.kafka010.KafkaIllegalStateException", "org.apache.spark.sql.kafka010.Reader", True),
        ("java.lang.IllegalStateException", "org.apache.spark.sql.kafka010.consumer.KafkaDataConsumer", True),
        ("java.lang.IllegalStateException", "org.apache.spark.sql.execution.Stage", False),
        ("java.lang.Exception", "org.apache.spark.sql.kafka010.consumer.KafkaDataConsumer", False),
    ],
)
def test_records_that_kafka_no_longer_has_are_told_from_other_errors(name: str, thrower: str, gone: bool) -> None:
    """Spark 3.5 has no error of its own for it."""
    assert is_input_gone(error_of_java(name, "gone", [thrower])) is gone


@pytest.mark.parametrize(
    ("stack", "passes"),
    [
        (["java.io.FileOutputStream", "java.io.BufferedOutputStream", "java.io.DataOutputStream", FACTORY], True),
        (["java.lang.ProcessBuilder$NullOutputStream", "java.io.DataOutputStream", FACTORY], True),
        (["java.lang.ProcessBuilder", "java.lang.ProcessBuilder", FACTORY], False),
        (["java.io.FileOutputStream", "java.io.DataOutputStream", "org.apache.hadoop.fs.RawLocalFileSystem"], False),
    ],
)
def test_a_pipe_to_the_process_that_workers_are_forked_from_may_break(stack: list[str], passes: bool) -> None:
    """Spark writes to this pipe which worker is to end, and fails if the process at its other end was killed. A
    program that cannot be started, and any other stream, are no reason to try again."""
    error = error_of_java("java.io.IOException", "Broken pipe", stack)
    assert may_pass(error) is passes


JOB = Cause("org.apache.spark.SparkException", "Job aborted due to stage failure: Task 1 in stage 0.0 failed 4 times")
WORKER = Cause("org.apache.spark.SparkException", "Python worker exited unexpectedly (crashed)", of_worker=True)
FILE = Cause("org.apache.spark.SparkException", "[FAILED_READ_FILE.NO_HINT] ...", {"path": "file:///in/a.gz"})
END = Cause("java.io.EOFException")
BROKEN = Cause("java.io.IOException", "Broken pipe", of_connection=True)
SOURCES = "spark.sql.execution.datasources"


def thrown(name: str, by: str) -> Cause:
    """An error of a class of Apache's."""
    return Cause(name, "no message", thrower=f"org.apache.{by}")


@pytest.mark.parametrize(
    ("causes", "lost"),
    [
        ([JOB, WORKER, END], True),
        ([JOB, WORKER, Cause("java.net.SocketException", "Broken pipe")], True),
        ([JOB, replace(BROKEN, thrower="org.apache.spark.api.python.BasePythonRunner")], True),
        ([JOB, replace(BROKEN, thrower="org.apache.hadoop.hdfs.DFSInputStream")], True),
        ([JOB, replace(BROKEN, of_connection=False)], False),
        ([JOB, END], False),
        ([FILE, END], False),
        ([FILE, Cause("java.net.SocketTimeoutException", "Read timed out")], True),
        ([JOB, Cause("org.apache.spark.storage.BlockNotFoundException")], True),
        ([replace(JOB, message=f"{JOB.message}: ExecutorLostFailure (executor 1 exited)")], True),
        ([replace(JOB, message=f"{JOB.message}: FetchFailed")], True),
        (
            [replace(JOB, message="Job aborted. Most recent failure reason:\nshuffle.FetchFailedException")],
            True,
        ),
        ([FILE, Cause("java.lang.IllegalArgumentException"), Cause("java.net.URISyntaxException")], False),
        ([replace(JOB, message=f"{JOB.message}: FetchFailed"), Cause("java.lang.ArithmeticException")], False),
        ([JOB], False),
        ([Cause("org.apache.spark.SparkNumberFormatException", "FetchFailed")], False),
        ([], False),
    ],
)
def test_what_is_lost_is_told_by_the_classes_of_the_causes(causes: list[Cause], lost: bool) -> None:
    """A truncated file ends as the connection to a dead worker does."""
    assert is_lost(causes) is lost


@pytest.mark.parametrize(
    ("causes", "of_content"),
    [
        ([JOB, FILE, thrown("java.io.EOFException", "hadoop.io.compress.DecompressorStream")], True),
        ([JOB, FILE, thrown("java.lang.RuntimeException", "parquet.hadoop.ParquetFileReader")], True),
        ([JOB, FILE, thrown("java.nio.BufferUnderflowException", "orc.impl.InStream")], True),
        ([JOB, thrown("java.io.EOFException", "hadoop.io.compress.DecompressorStream")], False),
        ([JOB, FILE, thrown("java.io.EOFException", "hadoop.hdfs.DFSInputStream")], False),
        ([JOB, FILE, thrown("java.net.SocketTimeoutException", "parquet.io.SeekableInputStream")], False),
        ([JOB, FILE, thrown("java.io.IOException", "hadoop.fs.RawLocalFileSystem")], False),
        ([JOB, FILE, thrown("java.io.FileNotFoundException", f"{SOURCES}.FileScanRDD$$anon$1")], False),
        ([JOB, FILE, thrown("org.apache.hadoop.hdfs.BlockMissingException", "hadoop.hdfs.DFSInputStream")], False),
        ([JOB, FILE, thrown("java.lang.OutOfMemoryError", "orc.impl.InStream")], False),
        ([JOB, FILE, thrown("org.apache.spark.memory.SparkOutOfMemoryError", f"{SOURCES}.parquet.Any")], False),
        ([JOB, FILE, thrown("java.lang.RuntimeException", "hadoop.io.compress.ZStandardCodec")], False),
        ([JOB, FILE, thrown("org.xerial.snappy.SnappyError", "hadoop.io.compress.SnappyLoader")], False),
        ([JOB, FILE, thrown("java.lang.RuntimeException", "parquet.crypto.DecryptionKeyRetriever")], False),
        ([FILE, replace(WORKER, thrower="org.apache.spark.api.python.BasePythonRunner")], False),
        ([FILE, Cause("py4j.Py4JException")], False),
        ([], False),
    ],
)
def test_only_what_a_file_holds_makes_it_a_dead_letter(causes: list[Cause], of_content: bool) -> None:
    assert is_of_content(causes) is of_content


def test_a_file_that_is_found_bad_resets_a_run_however_many_resets_are_allowed() -> None:
    resets = Resets("s", RecoveryOptions(resets=0, reset_delay_s=0), StopRequest())
    error = StateError("stopped in step 3")
    for _ in range(5):
        assert resets.may_reset(error, error, is_news=True)
        resets.wait(error, is_news=True)
    assert not resets.may_reset(error, error) and not resets.may_reset(AWAY, AWAY)
    assert not resets.may_reset(Fenced("by epoch 4"), error, is_news=True) and resets.count == 5


def test_resets_in_a_row_are_bounded_and_wait_longer_each_time() -> None:
    resets, slept = Resets("s", RecoveryOptions(resets=3, reset_delay_s=2.0), StopRequest()), list[float]()
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    with (
        patch("siltstone.spark.resets.time.sleep", sleep),
        patch("siltstone.spark.resets.time.monotonic", lambda: clock[0]),
    ):
        for _ in range(3):
            assert resets.may_reset(AWAY, AWAY)
            before = clock[0]
            resets.wait(AWAY)
            slept.append(round(clock[0] - before))
        assert not resets.may_reset(AWAY, AWAY) and resets.count == 3
        resets.note_checkpoint()
        assert resets.may_reset(AWAY, AWAY)
    assert slept == [2, 4, 8]


def test_what_was_fenced_or_asked_to_stop_is_not_reset() -> None:
    stop = StopRequest()
    resets = Resets("s", RecoveryOptions(), stop)
    assert resets.may_reset(StateError("stopped in step 3"), AWAY)
    assert not resets.may_reset(Fenced("by epoch 4"), AWAY)
    stop.ask("SIGTERM")
    resets.wait(AWAY)  # does not wait
    assert not resets.may_reset(AWAY, AWAY)


def test_a_reset_begins_its_epoch_only_directly_after_its_own(place: OpenWarehouse) -> None:
    place.catalog.streams.register("s", 8, {}, NEW_STREAM.to_record())
    tenure = Tenure()
    assert [take_over(place, "s", "this run", tenure) for _ in range(2)] == [1, 2] and tenure.epoch == 2
    with patch.object(type(place.warehouse.store), "put", side_effect=AWAY), pytest.raises(Unreachable):
        take_over(place, "s", "this run", tenure)
    assert tenure.epoch == 3, "begun in the catalog, if not marked in the store"
    assert take_over(place, "s", "this run", tenure) == 4
    assert take_over(place, "s", "another run") == 5
    with pytest.raises(Fenced, match="epoch 4 of stream s was fenced by epoch 5"):
        take_over(place, "s", "this run", tenure)
    assert place.catalog.streams.get("s").epoch == 5
