"""Decode the statistics of a checkpoint's manifest without trusting them (`run.step_reports`, `run.coordinator`).

The catalog keeps them as they are, and reports, policies and the page compute with them: every name that these look up
is there, and every number is one. What no reader knows is left alone.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from siltstone.decoding import check_integer, check_object
from siltstone.model import MAX_ID, MAX_NUMBER, Form, check_name, check_table_name

_TIME_MAX_MS = 10**14
"""later than any clock shows; twice as much is still a date"""
_PARTS = {"opaque": 3, "whole": 2}
"""how many numbers there are of each variable, or of a table, under these names"""

COUNTS = frozenset(
    ("base_rows", "checkpoints", "d", "dear_for", "deltas", "restores", "rows", "rows_before", "seen", "untracked")
)
MAY_BE_NULL = frozenset(["log_ratio"])
"""what of a chain is a whole number, or null (`chains.policy_rules.PolicyState`)"""


def check_statistics(plain: Mapping[str, Any], operators: Collection[str], max_parallelism: int) -> None:
    """Check the statistics of a checkpoint with these operators.

    Raises:
        ValueError, TypeError, KeyError, UsageError: they are damaged.
    """
    json.dumps(plain, allow_nan=False)  # no catalog holds other numbers, also where no reader knows the name
    _check_counts(plain, "the statistics", "rows_in", "state_rows")
    check_integer(plain["parallelism"], 1, max_parallelism, "parallelism")
    for operator, count in check_object(plain.get("dead_letters", {}), "dead_letters").items():
        check_integer(count, 0, MAX_NUMBER, f"dead_letters of {check_name('operator', operator)}")
    if (outputs := plain.get("outputs")) is not None:
        for output, count in check_object(outputs, "outputs").items():
            check_integer(count, 0, MAX_NUMBER, f"rows of output {check_name('operator', output)}")
    said = check_object(plain["operators"], "operators of the statistics")
    for operator in {*operators, *said}:
        _check_operator(check_object(said[operator], f"statistics of {check_name('operator', operator)}"), operator)
    if times := plain.get("times"):
        _check_times(check_object(times, "times"))


def check_numbers(plain: Mapping[str, Any], what: str) -> None:
    """Check that an object has no other values than numbers and nulls.

    Raises:
        ValueError: it has; the message calls it `what`.
    """
    for name, value in plain.items():
        if value is not None:
            _check_number(value, f"{name} of {what}")


def _check_operator(said: Mapping[str, Any], operator: str) -> None:
    what = f"the statistics of {operator}"
    _check_counts(said, what, "rows_in", "state_rows", "bytes")
    check_numbers(check_object(said["seconds"], f"seconds of {operator}"), f"seconds of {operator}")
    known = ("incremental_bytes", "index_bytes", "restore_bound_bytes", "restore_bound_s")
    check_numbers({name: said[name] for name in known if name in said}, what)
    for variable, numbers in check_object(said.get("opaque", {}), f"opaque variables of {operator}").items():
        _check_list(numbers, _PARTS["opaque"], f"{operator}.{check_table_name(variable)}")
    for table, of in check_object(said["tables"], f"tables of {operator}").items():
        _check_table(check_object(of, table), f"{operator}.{check_table_name(table)}")


def _check_table(of: Mapping[str, Any], what: str) -> None:
    check_integer(of["D"], 0, MAX_NUMBER, f"D of {what}")
    _check_chain(check_object(of["chain"], f"the chain of {what}"), what)
    known = ("bytes", "rows", "seconds", "index_bytes", "restore_bound_bytes", "restore_bound_s")
    check_numbers({name: of[name] for name in known if name in of}, what)
    if "form" in of:
        Form(of["form"])
    if "whole" in of:
        _check_list(of["whole"], _PARTS["whole"], f"what {what} wrote whole")


def _check_chain(chain: Mapping[str, Any], what: str) -> None:
    check_numbers(chain, f"the chain of {what}")
    for name, value in chain.items():
        if (value is None and name not in MAY_BE_NULL) or (name in COUNTS and type(value) is not int):
            raise ValueError(f"{name} of the chain of {what} is {value}")
    check_integer(chain.get("first", 1), 1, MAX_ID, f"first of the chain of {what}")


def _check_times(times: Mapping[str, Any]) -> None:
    check_integer(times["from"], 0, _TIME_MAX_MS, "the first time")
    for id, *events in times["checkpoints"]:
        check_integer(id, 1, MAX_ID, "a checkpoint")
        for at in (each for each in events if each is not None):
            check_integer(at, 0, _TIME_MAX_MS, "a time of a checkpoint")
    for number, began, ended in times["steps"]:
        check_integer(number, 0, MAX_ID, "a step")
        for at in (began, ended):
            check_integer(at, 0, _TIME_MAX_MS, "a time of a step")


def _check_counts(plain: Mapping[str, Any], what: str, *names: str) -> None:
    for name in names:
        check_integer(plain[name], 0, MAX_NUMBER, f"{name} of {what}")


def _check_list(numbers: Any, length: int, what: str) -> None:
    if not isinstance(numbers, Sequence) or len(numbers) != length:
        raise ValueError(f"the statistics of {what} are not {length} numbers")
    for number in numbers:
        _check_number(number, what)


def _check_number(value: object, what: str) -> None:
    if not (type(value) is int and abs(value) <= MAX_NUMBER) and not (type(value) is float and math.isfinite(value)):
        raise ValueError(f"{what} is {str(value)[:40]!r}, not a number")
