"""What a user sees of an error that has only a text: its last word, not a line of a stack."""

import pytest
from pyspark.errors import PySparkException

from siltstone.spark.failures import explain

WORKER = """
  An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "/srv/app/step.py", line 3, in run
    raise SomeError("x")
ValueError: mine
and a second line

\tat org.apache.spark.util.SparkErrorUtils.tryWithResource$(SparkErrorUtils.scala:48)
\tat org.apache.spark.api.python.BasePythonRunner.compute(PythonRunner.scala:174)
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (WORKER, "ValueError: mine"),
        (WORKER.replace("ValueError: mine", "pyarrow.lib.ArrowInvalid: mine"), "pyarrow.lib.ArrowInvalid: mine"),
        (
            WORKER.replace("ValueError: mine", "siltstone.run.users_code.OperatorFailed: operator a: KeyError: 'k'"),
            "operator a: KeyError: 'k'",
        ),
        ("[TABLE_OR_VIEW_NOT_FOUND] The table `x` cannot be found.\n; line 1 pos 14;\n'Project [*]", None),
        ("", "no message"),
    ],
)
def test_the_error_itself_is_said(text: str, said: str | None) -> None:
    assert explain(PySparkException(text)) == (said or text.splitlines()[0])
