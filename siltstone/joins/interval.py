"""`IntervalJoin`: pairs of rows of two inputs whose event times are close, as SQL's join over all rows would have them.

A pair is returned once, when the later of its rows comes. A row is kept until no partner can come. With W the watermark
of a step and W' that of the step before, rows that come have times from W' on, so after a step

    a left row is of no more use once upper(left) < W        its partners are at most at upper(left)
    a right row is of no more use once right - lower < W     its partners are at least lower before it

and both fall due one microsecond later than that bound. Rows that found no partner are returned then.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from siltstone.errors import UsageError
from siltstone.joins.kept import MET, ROWS_A_BATCH, Kept, KeptAccess, KeptRows
from siltstone.joins.matching import TimeOrder, shift, split_pairs
from siltstone.joins.sides import TIME, Side, join_keys, list_names, make_sides
from siltstone.operator import Operator, Rows, State
from siltstone.state.columns import is_micros, null_mask, one_array, read_times
from siltstone.state.time_index import DueRows
from siltstone.state.variables import ColumnTypes, schema_of
from siltstone.times import LONGEST, parse_duration

__all__ = ["IntervalJoin"]


@dataclass(frozen=True)
class _How:
    """What a kind of join returns.

    Attributes:
        pairs: whether it returns pairs, rather than rows of the left side alone.
        left_alone, right_alone: whether it returns the rows of a side that have no partner.
    """

    pairs: bool = True
    left_alone: bool = False
    right_alone: bool = False


HOW = {
    "inner": _How(),
    "left": _How(left_alone=True),
    "right": _How(right_alone=True),
    "full": _How(left_alone=True, right_alone=True),
    "semi": _How(pairs=False),
    "anti": _How(pairs=False, left_alone=True),
}
PAIRS_A_BATCH = 1 << 18
"""pairs that are made at once, before `where` decides which of them count"""
_US = timedelta(microseconds=1)


@dataclass
class _Rows:
    """Rows of one side.

    Attributes:
        owner: int64[n], the ordinal of each row's key among those of the call.
        rows: the columns of the side.
        met: bool[n], whether each has found a partner; pairs set it.
    """

    owner: np.ndarray
    rows: pa.Table
    met: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.met = np.zeros(len(self.owner), bool)


@dataclass
class _Left(_Rows):
    """Rows of the left side, whose partners are from `low` to `high`, both inclusive (int64[n]); if `low` is later,
    they have none."""

    low: np.ndarray
    high: np.ndarray


@dataclass
class _Right(_Rows):
    """Rows of the right side, and their times (int64[n])."""

    at: np.ndarray

    @cached_property
    def in_order(self) -> TimeOrder:
        """The rows by key and time."""
        return TimeOrder(self.owner, self.at)


class IntervalJoin(Operator):
    """Joins rows of two inputs with equal keys whose event times are close.

        IntervalJoin(
            "won",
            key={"auction": pa.int64()},
            reads={"auctions": {"id": "auction"}, "bids": {"auction": "auction"}},
            on={"auctions": "opened", "bids": "at"},
            columns={"auctions": {"item": pa.string()}, "bids": {"price": pa.int64()}},
            between=("0 s", "1 hour"),
        )

    The first input is the left one. A pair of rows matches if `right time - left time` is within `between`, and `where`
    is true for it. The result is that of SQL's join over all rows that are not late, whatever the micro-batches:

        inner        each matching pair, once, in the step in which the second of its rows arrives
        left         these, and each left row without a partner, with nulls, once none can come
        right, full  likewise for the right rows, and for both
        semi         each left row that has a partner, once, when the first one comes
        anti         each left row that has none, once none can come

    State is the rows that may still find a partner: those of the left until the watermark has passed their upper bound,
    those of the right until it has passed their time less the lower bound. A step reads those of its keys.

    Args:
        name, key: see `Operator`. A row whose key is null is a bad row.
        reads: the left input and the right one -> {its column: the key column}.
        on: input -> its column with the event time, a timestamp.
        columns: input -> the columns that are kept and returned, `{name: type}`; the time is returned in any case.
        between: the least and the greatest `right time - left time`, both inclusive: lengths of time, such as "1 hour"
            or "-5 minutes", of which the second may also be the name of a column of the left input with the time until
            which partners count. A left row without that time has no partner.
        how: "inner", "left", "right", "full", "semi" or "anti".
        where: a further condition: a function of a table of pairs, with the names of the output (of both sides), that
            returns a boolean per row; null counts as false. It must tell the same of equal rows.
        names: input -> {column: its name in the output}, where names would be there twice.
        output_time: the column of the output with its event time: the time of a side whose rows are in every row of
            output. By default the one that holds operators that read the output back least; of an outer join the time
            of its side. There is none for "full", nor, if a column bounds the interval, for "left", "semi" and "anti".

    Raises:
        UsageError: an argument is missing or wrong.
    """

    keeps_key: bool = True
    left: KeptRows
    right: KeptRows

    def __init__(
        self,
        name: str,
        key: ColumnTypes,
        reads: Mapping[str, Mapping[str, str]],
        on: Mapping[str, str],
        between: tuple[str | timedelta, str | timedelta],
        columns: Mapping[str, ColumnTypes] | None = None,
        how: str = "inner",
        where: Callable[[pa.Table], Any] | None = None,
        names: Mapping[str, Mapping[str, str]] | None = None,
        output_time: str | None = None,
    ) -> None:
        what = f"operator {name}"
        if how not in HOW:
            raise UsageError(f"{what}: how is {how!r}: use {', '.join(map(repr, HOW))}")
        self.how: str = how
        self._how, self._where = HOW[how], where
        self._left, self._right = make_sides(what, reads, on, columns or {}, names or {})
        for side in (self._left, self._right):
            if side.at is None:
                raise UsageError(f"{what}: on lacks {side.name}: name its column with the event time")
        self._lower_us, self._upper = _read_bounds(what, between, self._left)
        keys = schema_of(key, f"the key of {what}")
        shown = [self._left.shown, self._right.shown]
        try:
            output = list_names(keys, *(shown if self._how.pairs else shown[:1]))
            self._pairs = list_names(keys, *shown) if where is not None else output
        except UsageError as error:
            raise UsageError(f"{what}: {error}") from None
        until = self._upper if isinstance(self._upper, str) else str(self._left.at)
        plus_us = 1 if isinstance(self._upper, str) else self._upper + 1
        flags = self._how.pairs and self._how.left_alone, self._how.right_alone
        self.left = KeptRows(_kept_columns(self._left, flags[0]), until, plus_us, how)
        self.right = KeptRows(_kept_columns(self._right, flags[1]), str(self._right.at), 1 - self._lower_us, how)
        time, holds_back_us = self._choose_time(what, output_time)
        super().__init__(
            name=name,
            key=keys,
            reads=reads,
            inputs={side.name: tuple(side.columns.names) for side in (self._left, self._right)},
            order_by=(*self._left.order, *self._right.order),
            output=output,
            output_time=time,
            holds_back=holds_back_us * _US,
        )

    def process(self, rows: Rows, state: State) -> pa.Table | None:
        """Return the pairs of which one row is new, and keep the new rows."""
        given = rows.of(self._left.name), rows.of(self._right.name)
        return self._join(*given, state)

    def time_column(self, name: str) -> str | None:
        return next((side.at for side in (self._left, self._right) if side.name == name), None)

    def on_due(self, table: str, take: Callable[[int], DueRows], state: State) -> Iterator[pa.Table]:
        """Drop the rows for which no partner can come any more, and return those that had none."""
        access: KeptAccess = getattr(state, table)
        is_left = table == "left"
        returned = self._how.left_alone if is_left else self._how.right_alone
        while len((due := take(ROWS_A_BATCH)).at):
            keys, rows = access.show_due(due)
            access.drop(due, *access.find_owners(due))
            if not returned:
                continue
            if MET in rows.column_names:
                alone = pa.array(~_read_flags(rows.column(MET)))
                keys, rows = keys.filter(alone), rows.filter(alone)
            yield self._return_alone(keys, rows, is_left=is_left)

    def _join(self, left: Rows, right: Rows, state: State) -> pa.Table:
        keys, left_key, right_key = join_keys(left, right)
        new_left = self._make_left(left_key[left.key_index], self._left.read(left))
        new_right = self._make_right(right_key[right.key_index], self._right.read(right))
        kept_left, kept_right = state.left.find(right.keys), state.right.find(left.keys)
        old_left = self._make_left(right_key[kept_left.owner], kept_left.rows)
        old_right = self._make_right(left_key[kept_right.owner], kept_right.rows)
        returned = [self.output.empty_table()]
        for one, other in ((new_left, old_right), (old_left, new_right), (new_left, new_right)):
            returned += self._pair(keys, one, other)
        never = new_left.low > new_left.high
        if not self._how.pairs and not self._how.left_alone:
            returned += [self._return_left(keys, one, one.met) for one in (old_left, new_left)]
        if self._how.left_alone:
            returned.append(self._return_left(keys, new_left, never))
        self._note_met(state.left, kept_left, old_left.met, removes=not self._how.pairs)
        self._note_met(state.right, kept_right, old_right.met)
        # What no later step can need is kept until the end of this one: it may have further calls.
        waits = ~never if self._how.pairs else ~(never | new_left.met)
        _keep(state.left, left, new_left, np.flatnonzero(waits), has_flag=self._how.pairs and self._how.left_alone)
        _keep(state.right, right, new_right, np.arange(len(right)), has_flag=self._how.right_alone)
        return pa.concat_tables(returned)

    def _pair(self, keys: pa.Table, left: _Left, right: _Right) -> Iterator[pa.Table]:
        """Note which rows have found a partner; yield the pairs, if pairs are returned."""
        if not len(left.owner) or not len(right.owner):
            return
        first, counts = right.in_order.find(left.owner, left.low, left.high)
        if self._where is None and not self._how.pairs:
            left.met |= counts > 0
            return
        for row, place in split_pairs(first, counts, PAIRS_A_BATCH):
            other = right.in_order.order[place]
            pairs = self._make_pairs(keys, left, row, right, other)
            passing = self._ask(pairs)
            left.met[row[passing]] = True
            right.met[other[passing]] = True
            if self._how.pairs:
                yield pairs if passing.all() else pairs.filter(pa.array(passing))

    def _make_pairs(self, keys: pa.Table, left: _Left, row: np.ndarray, right: _Right, other: np.ndarray) -> pa.Table:
        own = keys.take(pa.array(left.owner[row]))
        sides = self._left.show(left.rows.take(pa.array(row))), self._right.show(right.rows.take(pa.array(other)))
        return pa.table([*own.columns, *sides[0].columns, *sides[1].columns], schema=self._pairs)

    def _ask(self, pairs: pa.Table) -> np.ndarray:
        """Return for which pairs `where` is true (bool[n]).

        Raises:
            UsageError: it does not return a boolean per pair.
        """
        if self._where is None:
            return np.ones(pairs.num_rows, bool)
        told = self._where(pairs)
        told = one_array(told if isinstance(told, pa.Array | pa.ChunkedArray) else pa.array(told))
        if not pa.types.is_boolean(told.type) or len(told) != pairs.num_rows:
            raise UsageError(
                f"operator {self.name}: where returned {len(told)} values of type {told.type} for {pairs.num_rows} "
                "pairs: return a boolean per row of its table"
            )
        return _read_flags(told)

    def _return_left(self, keys: pa.Table, left: _Left, which: np.ndarray) -> pa.Table:
        chosen = pa.array(np.flatnonzero(which))
        return self._return_alone(keys.take(pa.array(left.owner[which])), left.rows.take(chosen), is_left=True)

    def _return_alone(self, keys: pa.Table, rows: pa.Table, *, is_left: bool) -> pa.Table:
        """Return rows of one side, with nulls for the other side."""
        own = (self._left if is_left else self._right).show(rows)
        other = (self._right if is_left else self._left).show_nothing(len(rows))
        sides = [own, other] if is_left else [other, own]
        columns = [column for side in (sides if self._how.pairs else sides[:1]) for column in side.columns]
        return pa.table([*keys.columns, *columns], schema=self.output)

    def _note_met(self, access: KeptAccess, kept: Kept, met: np.ndarray, *, removes: bool = False) -> None:
        """Note which kept rows have found a partner: remove them, or set their flag, if they have one."""
        if removes and met.any():
            access.remove(kept.take(np.flatnonzero(met)))
        elif not removes and MET in kept.rows.column_names:
            fresh = kept.take(np.flatnonzero(met & ~_read_flags(kept.rows.column(MET))))
            if len(fresh.owner):
                place = fresh.rows.column_names.index(MET)
                fresh.rows = fresh.rows.set_column(place, MET, pa.array(np.ones(len(fresh.owner), bool)))
                access.replace(fresh)

    def _make_left(self, owner: np.ndarray, rows: pa.Table) -> _Left:
        at = self._left.times(rows)
        low, beyond = shift(at, self._lower_us)
        none = beyond & (self._lower_us > 0)
        if isinstance(self._upper, str):
            until = one_array(rows.column(self._upper))
            high = read_times(until)
            none |= null_mask(until)
        else:
            high, beyond = shift(at, self._upper)
            none |= beyond & (self._upper < 0)
        return _Left(owner, rows, np.where(none, 1, low), np.where(none, 0, high))

    def _make_right(self, owner: np.ndarray, rows: pa.Table) -> _Right:
        return _Right(owner, rows, self._right.times(rows))

    def _choose_time(self, what: str, given: str | None) -> tuple[str | None, int]:
        """Return the column with the event time of the output, and how much it may be before the watermark (us).

        A side's row that a step returns is new, with a time from W' on, or it was kept, and so not due in the step
        before: for a kept left row W' <= left + upper, so left >= W' - upper; for a kept right one W' <= right - lower,
        so right >= W' + lower. So in both cases it is at most max(upper, 0), or max(-lower, 0), before W'.

        Raises:
            UsageError: the column given cannot be it.
        """
        fit = dict[str, int]()
        if not self._how.right_alone and not isinstance(self._upper, str):
            fit[str(self._left.shown_at)] = max(self._upper, 0)
        if self._how.pairs and not self._how.left_alone:
            fit[str(self._right.shown_at)] = max(-self._lower_us, 0)
        if given is None:
            return min(fit.items(), key=lambda one: one[1], default=(None, 0))
        if given not in fit:
            raise UsageError(
                f"{what}: output_time is {given!r}: use {' or '.join(map(repr, fit)) or 'none, and leave it out'}, "
                "since other times may be null, or long ago"
            )
        return given, fit[given]


def _keep(access: KeptAccess, rows: Rows, new: _Rows, which: np.ndarray, *, has_flag: bool) -> None:
    """Add new rows to state."""
    table = new.rows.append_column(MET, pa.array(new.met)) if has_flag else new.rows
    access.append(rows.keys, rows.key_index[which], table.take(pa.array(which)))


def _kept_columns(side: Side, has_flag: bool) -> pa.Schema:
    return side.columns.append(pa.field(MET, pa.bool_())) if has_flag else side.columns


def _read_flags(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Return bool[n]; null is false."""
    return one_array(column).fill_null(False).to_numpy(zero_copy_only=False)


def _read_bounds(what: str, between: Sequence[str | timedelta], left: Side) -> tuple[int, int | str]:
    """Return the least difference of times in microseconds, and the greatest, or the column with the last time.

    Raises:
        UsageError: they are not an interval.
    """
    if isinstance(between, str) or len(between) != 2:
        raise UsageError(f'{what}: between is {between!r}: give two bounds, such as ("0 s", "1 hour")')
    lower_us = _read_bound(what, between[0])
    if isinstance(between[1], str) and between[1] in left.columns.names:
        kind = left.columns.field(between[1]).type
        if not is_micros(kind):
            raise UsageError(f"{what}: partners count until {between[1]}, which is {kind}: use {TIME}")
        return lower_us, between[1]
    upper_us = _read_bound(what, between[1])
    if upper_us < lower_us:
        raise UsageError(f"{what}: between is {between!r}, which no difference is within: give the lesser bound first")
    return lower_us, upper_us


def _read_bound(what: str, bound: str | timedelta) -> int:
    """Return a bound in microseconds; unlike other lengths of time, it may be negative."""
    try:
        if isinstance(bound, timedelta):
            length, sign = abs(bound), 1 if bound >= timedelta(0) else -1
        else:
            length, sign = parse_duration(bound.strip().removeprefix("-")), -1 if bound.strip()[:1] == "-" else 1
    except (UsageError, AttributeError):
        raise UsageError(
            f"{what}: between has {bound!r}: use a length of time such as '1 hour' or '-5 minutes'; the second may be "
            "a column of the left input"
        ) from None
    if length > LONGEST:
        raise UsageError(f"{what}: between has {bound!r}: use at most {LONGEST.days} days")
    return sign * (length // _US)
