"""Laws of retention over any history, any rules, any savepoints."""

from datetime import UTC, date, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siltstone.catalog.records.savepoints import SavepointRecord
from siltstone.errors import UsageError
from siltstone.retention.retention_rules import RetentionOptions, RetentionPlan, plan_retention

START = datetime(2013, 12, 27, tzinfo=UTC)
"""so that weeks, months and years end within a history"""
COUNTS = ("keep_last", "keep_hourly", "keep_daily", "keep_weekly", "keep_monthly")
TIMES = st.integers(0, 60 * 24 * 60).map(lambda minutes: timedelta(minutes=minutes))
JUMPS = st.integers(-400, 400).map(lambda days: timedelta(days=days))
"""what a clock may jump by, for one commit or from one on"""
BUCKETS = {
    "keep_hourly": lambda t: (t.date(), t.hour),
    "keep_daily": lambda t: t.date(),
    "keep_weekly": lambda t: t.date() - timedelta(days=t.weekday()),
    "keep_monthly": lambda t: (t.year, t.month),
}


@st.composite
def histories(draw) -> dict[int, datetime]:
    """checkpoint -> when it was committed, in a zone of its own; some have been deleted, many are close together.

    In some histories the clock jumped, ahead and back.
    """
    ages = sorted(draw(st.lists(TIMES, min_size=1, max_size=25)))
    for at in draw(st.lists(st.integers(0, len(ages) - 1), max_size=3)):
        until = draw(st.sampled_from([at + 1, len(ages)]))
        jump = draw(JUMPS)
        ages[at:until] = [age + jump for age in ages[at:until]]
    zones = st.integers(-12, 14).map(lambda hours: timezone(timedelta(hours=hours)))
    ids = sorted(draw(st.sets(st.integers(1, 60), min_size=len(ages), max_size=len(ages))))
    return {id: (START + age).astimezone(draw(zones)) for id, age in zip(ids, ages, strict=True)}


NOWS = TIMES.map(lambda age: START + timedelta(days=30) + age)


@st.composite
def options(draw, *, some: bool = True) -> RetentionOptions:
    """Rules of which at least one is set, if `some`."""
    count = st.none() | st.integers(0, 8)
    rules = {name: draw(count) for name in COUNTS} | {"keep_within": draw(st.none() | TIMES)}
    if some and all(value is None for value in rules.values()):
        rules["keep_last"] = draw(st.integers(0, 8))
    return RetentionOptions(**rules, min_count=draw(st.integers(0, 3)), min_age=draw(st.just(timedelta(0)) | TIMES))


@st.composite
def savepoints(draw) -> list[SavepointRecord]:
    """Of any checkpoints, there or not; some have expired."""
    some = st.lists(st.tuples(st.integers(1, 60), st.none() | NOWS), max_size=4)
    return [SavepointRecord("s", f"s{n}", id, START, expires) for n, (id, expires) in enumerate(draw(some))]


def pinned(history, named, now) -> set[int]:
    """What is kept even by rules that keep nothing."""
    return {max(history)} | {s.checkpoint for s in named if s.checkpoint in history and not s.is_expired(now)}


def left(history, named, rules, now) -> set[int]:
    """What is kept; of rules that are refused, what would be."""
    try:
        plan = plan_retention(history, named, rules, now)
    except UsageError as refused:
        assert "keep none of" in str(refused)
        return pinned(history, named, now)
    return set(plan.kept)


@given(histories(), savepoints(), options(some=False), NOWS)
def test_each_is_kept_for_a_reason_or_subsumed(history, named, rules, now):
    try:
        plan = plan_retention(history, named, rules, now)
    except UsageError:
        assert rules.rules and pinned(history, named, now) != set(history)
        return
    assert [*plan.kept] == sorted(plan.kept) and [*plan.subsumed] == sorted(plan.subsumed)
    assert {*plan.kept, *plan.subsumed} == set(history) and not {*plan.kept} & {*plan.subsumed}
    assert all(plan.kept.values())
    assert pinned(history, named, now) <= set(plan.kept)


@given(histories(), savepoints(), options(), NOWS)
def test_minimums_hold(history, named, rules, now):
    kept = left(history, named, rules, now)
    assert set(sorted(history)[-rules.min_count :] if rules.min_count else ()) <= kept
    assert {id for id, at in history.items() if rules.min_age and now - at < rules.min_age} <= kept


@given(histories(), savepoints(), options(), NOWS, st.data())
def test_to_relax_a_rule_never_deletes_more(history, named, rules, now, data):
    name = data.draw(st.sampled_from([*COUNTS, "keep_within", "min_count", "min_age"]))
    before = getattr(rules, name)
    if name in ("keep_within", "min_age"):
        relaxed = (before or timedelta(0)) + data.draw(TIMES)
    else:
        relaxed = (before or 0) + data.draw(st.integers(0, 5))
    looser = rules.model_copy(update={name: relaxed})
    assert left(history, named, rules, now) <= left(history, named, looser, now)


@given(histories(), savepoints(), options(), NOWS)
def test_a_savepoint_more_never_deletes_more(history, named, rules, now):
    for more in range(len(named)):
        assert left(history, named[:more], rules, now) <= left(history, named[: more + 1], rules, now)


@given(histories(), savepoints(), options(), NOWS)
def test_the_second_time_nothing_goes(history, named, rules, now):
    try:
        first = plan_retention(history, named, rules, now)
    except UsageError:
        return
    after = {id: at for id, at in history.items() if id in first.kept}
    assert plan_retention(after, named, rules, now) == RetentionPlan(first.kept, ())


@given(histories(), st.sampled_from(sorted(BUCKETS)), st.integers(1, 8), NOWS)
def test_of_each_bucket_its_newest_is_kept(history, rule, count, now):
    newest = {}
    for id in sorted(history):
        newest[BUCKETS[rule](history[id].astimezone(UTC))] = id
    wanted = sorted(newest.values())[-count:]
    plan = plan_retention(history, [], RetentionOptions(**{rule: count}), now)
    assert list(plan.kept) == wanted


@given(histories(), st.integers(1, 30), TIMES, NOWS)
def test_the_last_and_the_recent_are_kept(history, count, within, now):
    assert left(history, [], RetentionOptions(keep_last=count), now) == set(sorted(history)[-count:])
    recent = {id for id, at in history.items() if at >= now - within}
    assert left(history, [], RetentionOptions(keep_within=within), now) == recent | {max(history)}


@given(histories(), savepoints(), st.integers(0, 3), TIMES, NOWS)
def test_without_a_rule_nothing_goes(history, named, count, age, now):
    plan = plan_retention(history, named, RetentionOptions(min_count=count, min_age=age), now)
    assert (set(plan.kept), plan.subsumed) == (set(history), ())


@given(histories(), savepoints(), NOWS, st.sampled_from([*COUNTS, "keep_within"]))
def test_rules_that_keep_none_are_refused(history, named, now, rule):
    rules = RetentionOptions(**{rule: timedelta(0) if rule == "keep_within" else 0})
    recent = rule == "keep_within" and max(history.values()) >= now
    if set(history) == pinned(history, named, now) or recent:
        assert set(plan_retention(history, named, rules, now).kept) >= pinned(history, named, now)
        return
    with pytest.raises(UsageError, match=f"keep none of {len(history)} checkpoints .{rule} 0.*: keep more"):
        plan_retention(history, named, rules, now)


def test_one_history_by_hand():
    """Every three hours for three days from a Saturday on, as in the documentation of `borg prune`."""
    saturday = datetime(2013, 6, 29, tzinfo=UTC)
    assert date(2013, 6, 29).isoweekday() == 6
    history = {n + 1: saturday + timedelta(hours=3 * n) for n in range(24)}
    stable = SavepointRecord("s", "stable", 3, saturday, None)
    gone = SavepointRecord("s", "gone", 4, saturday, saturday + timedelta(days=1))
    rules = RetentionOptions(
        keep_last=2,
        keep_within="4h",
        keep_hourly=1,
        keep_daily=2,
        keep_weekly=5,
        keep_monthly=2,
        min_count=1,  # pyright: ignore[reportArgumentType]
    )
    plan = plan_retention(history, [gone, stable], rules, saturday + timedelta(days=3))
    assert plan.kept == {
        3: ("savepoint stable",),
        16: ("daily 2013-06-30", "weekly 2013-W26", "monthly 2013-06"),
        23: ("last",),
        24: (
            "newest",
            "last",
            "within",
            "hourly 2013-07-01T21",
            "daily 2013-07-01",
            "weekly 2013-W27",
            "monthly 2013-07",
            "minimum count",
        ),
    }
    assert plan.subsumed == tuple(id for id in range(1, 25) if id not in plan.kept)
