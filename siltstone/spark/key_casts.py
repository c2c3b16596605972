"""Cast key columns to their declared types, in the JVM, which hashes them: never so that two keys become one.

Each value is cast, cast back, and compared with what it was: if that differs, the row cannot be taken. For example, an
integer key takes 2.0 but not 1.75, and the text "1" but not "01". Timestamps with and without a zone are not cast:
Spark holds both as microseconds in UTC. A cast that depends on the session's settings, such as one of a timestamp to a
date or to text, is refused before anything runs.
"""

from pyspark.sql import types as T

from siltstone.errors import UsageError
from siltstone.operator import Operator
from siltstone.run.inputs import misfit_reason
from siltstone.run.users_code import OperatorFailed
from siltstone.spark.types import spark_type
from siltstone.state.json_rows import SHOWN_CHARACTERS

_TIMES = (T.TimestampType, T.TimestampNTZType)
_FROM_TEXT = (T.IntegralType, T.BooleanType, T.DateType)
"""types whose values have one text in every session"""
_WHOLE = {"float": 1 << 24, "double": 1 << 53}
"""greatest integer up to which a float represents each; beyond it, a cast back may round, or stop at a type's end"""
_BINARY = "UTF8_BINARY"


def check_key_types(given: T.StructType, operator: Operator, name: str) -> None:
    """Make sure that the key columns of an operator's input (all in `given`) have types that can be cast to the
    declared ones.

    Raises:
        UsageError: one has not, or its text is compared by a collation.
    """
    for key, column in operator.key_columns(name).items():
        kind, declared = given[column].dataType, spark_type(operator.key.field(key).type)
        what = f"operator {operator.name}: key column {key}"
        collation = getattr(kind, "collation", _BINARY)  # none before Spark 4.0
        if collation != _BINARY:
            raise UsageError(
                f"{what} is text of the collation {collation}, by which several texts are equal, and a key is compared "
                f"by its bytes: choose one text for each in the source, such as lower({column}), and "
                f"collate it {_BINARY}"
            )
        if not (needs_no_cast(kind, declared) or _may_cast(kind, declared)):
            raise UsageError(
                f"{what} is {kind.simpleString()} in {name}, and {declared.simpleString()} where it is "
                "declared: such a cast depends on the session's settings, or makes one of several values, or of one "
                "value several once the source's type changes: declare it as it is, or convert it in the source"
            )


def needs_no_cast(given: T.DataType, declared: T.DataType) -> bool:
    """Whether a key column is read as it is."""
    return given == declared or (isinstance(given, _TIMES) and isinstance(declared, _TIMES))


def cast_key(column: str, given: T.DataType, operator: Operator, name: str, *, fails: bool) -> str:
    """Return SQL for a key column as its declared type. It depends on no setting, such as the ANSI mode.

    Args:
        column: SQL for the column that it is made of.
        given: that column's type.
        name: the key column.
        fails: whether a value that does not fit fails the step, as an error of the user's code does. The error shows it
            as JSON, in which it ends no line. If not, it is null.
    """
    declared = spark_type(operator.key.field(name).type)
    if needs_no_cast(given, declared):
        return column
    cast = _try_cast(column, given, declared)
    if not fails:
        return cast
    reason = f"{OperatorFailed.__name__}: {misfit_reason(operator, name)}: ".encode().hex()
    said = f"concat(cast(X'{reason}' as string), left(to_json(struct({column})), {SHOWN_CHARACTERS}))"
    failed = f"case when {column} is not null then cast(raise_error({said}) as {declared.simpleString()}) end"
    return f"coalesce({cast}, {failed})"


def _try_cast(column: str, given: T.DataType, declared: T.DataType) -> str:
    """Return SQL that casts a column, and is null where the value would not stay the same."""
    cast = f"try_cast({column} as {declared.simpleString()})"
    same = f"try_cast({cast} as {given.simpleString()}) = {column}"
    for kind, other in ((given, declared), (declared, given)):
        if isinstance(kind, T.FractionalType) and isinstance(other, T.IntegralType | T.DecimalType):
            most = _WHOLE.get(kind.simpleString())
            same += f" and {column} between -{most} and {most}" if most else ""
    return f"case when {same} then {cast} end"


def _may_cast(given: T.DataType, declared: T.DataType) -> bool:
    if isinstance(given, T.NumericType):
        return isinstance(declared, T.NumericType)
    if isinstance(given, T.StringType | T.CharType | T.VarcharType):
        return isinstance(declared, (T.StringType, *_FROM_TEXT))
    return False
