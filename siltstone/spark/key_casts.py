"""Cast key columns to their declared types, in the JVM, which hashes them: never so that two keys become one.

A cast is allowed if the value is the same afterwards: it is cast back and compared. So 1.75 is no integer, and "01" is
not 1. A timestamp is the instant that it is, with or without zone, and is not cast at all: both are microseconds in
UTC. What depends on the session's settings, such as a timestamp's date or text, is refused before anything runs.
"""

from pyspark.sql import types as T

from siltstone.errors import UsageError
from siltstone.operator import Operator
from siltstone.run.processing import misfit_reason
from siltstone.run.users_code import OperatorFailed
from siltstone.spark.types import quote, spark_type

_TIMES = (T.TimestampType, T.TimestampNTZType)
_FROM_TEXT = (T.IntegralType, T.BooleanType, T.DateType)
"""types whose values have one text in every session"""
_WHOLE = {"float": 1 << 24, "double": 1 << 53}
"""greatest integer up to which a float represents each; beyond it, a cast back may round, or stop at a type's end"""
_BINARY = "UTF8_BINARY"
_SHOWN_CHARACTERS = 100
"""of a key's value in an error"""


def check_key_types(given: T.StructType, operator: Operator) -> None:
    """Make sure that an operator's key columns (all in `given`) have types that can be cast to the declared ones.

    Raises:
        UsageError: one has not, or its text is compared by a collation.
    """
    for field in operator.key:
        kind, declared = given[field.name].dataType, spark_type(field.type)
        what = f"operator {operator.name}: key column {field.name}"
        collation = getattr(kind, "collation", _BINARY)  # none before Spark 4.0
        if collation != _BINARY:
            raise UsageError(
                f"{what} is text of the collation {collation}, by which several texts are equal, and a key is compared "
                f"by its bytes: choose one text for each in the source, such as lower({field.name}), and collate it "
                f"{_BINARY}"
            )
        if not (needs_no_cast(kind, declared) or _may_cast(kind, declared)):
            raise UsageError(
                f"{what} is {kind.simpleString()} in {operator.reads}, and {declared.simpleString()} where it is "
                "declared: such a cast depends on the session's settings, or makes one of several values, or of one "
                "value several once the source's type changes: declare it as it is, or convert it in the source"
            )


def needs_no_cast(given: T.DataType, declared: T.DataType) -> bool:
    """Whether a key column is read as it is."""
    return given == declared or (isinstance(given, _TIMES) and isinstance(declared, _TIMES))


def try_cast_key(name: str, given: T.DataType, declared: T.DataType) -> str:
    """Return SQL that casts a key column; null where it does not fit. It depends on no setting, as `cast` on ANSI."""
    column = quote(name)
    if needs_no_cast(given, declared):
        return column
    cast = f"try_cast({column} as {declared.simpleString()})"
    same = f"try_cast({cast} as {given.simpleString()}) = {column}"
    for kind, other in ((given, declared), (declared, given)):
        if isinstance(kind, T.FractionalType) and isinstance(other, T.IntegralType | T.DecimalType):
            most = _WHOLE.get(kind.simpleString())
            same += f" and {column} between -{most} and {most}" if most else ""
    return f"case when {same} then {cast} end"


def cast_key(name: str, given: T.DataType, operator: Operator) -> str:
    """Return SQL that casts a key column. A value that does not fit fails the step, as an error of the user's code
    does; it is shown as JSON, in which it ends no line."""
    column, declared = quote(name), spark_type(operator.key.field(name).type)
    if needs_no_cast(given, declared):
        return column
    reason = f"{OperatorFailed.__name__}: {misfit_reason(operator, name)}: ".encode().hex()
    said = f"concat(cast(X'{reason}' as string), left(to_json(struct({column})), {_SHOWN_CHARACTERS}))"
    failed = f"case when {column} is not null then cast(raise_error({said}) as {declared.simpleString()}) end"
    return f"coalesce({try_cast_key(name, given, declared)}, {failed}) as {column}"


def _may_cast(given: T.DataType, declared: T.DataType) -> bool:
    if isinstance(given, T.NumericType):
        return isinstance(declared, T.NumericType)
    if isinstance(given, T.StringType | T.CharType | T.VarcharType):
        return isinstance(declared, (T.StringType, *_FROM_TEXT))
    return False
