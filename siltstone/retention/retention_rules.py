"""Which checkpoints a stream keeps and why, and which retention subsumes: a pure decision.

Rules as those of backup tools (restic `forget`, borg `prune`): a checkpoint that any of them keeps is kept.

    keep_last N         the newest N
    keep_within D       those committed in the last D before now, and those committed just D ago
    keep_hourly N       of each of the newest N hours in which there is one, its newest; so too
    keep_daily, keep_weekly, keep_monthly
    keep_all        every one

Hours, days, weeks (ISO 8601, from Monday on) and months are those of UTC. 0 keeps none by that rule. Whatever the rules
say, the newest is kept, and each with a savepoint that has not expired, the newest `min_count`, and those younger than
`min_age`. Without a rule all are kept: the minimums alone make nothing go.

Newer is of a higher id: where a clock was wrong, times do not grow with ids. What bears a time that has yet to come is
younger than any age.

A new stream begins with `NEW_STREAM`, recorded with it in the catalog (`siltstone retention` shows and changes that).
Rules in the settings or on the command line stand in for all recorded ones, and a minimum for the one of its name.

[retention]
keep_last = 10
keep_daily = 7
min_age = "1h"
input_log = "30d"

The input log is kept as far back as the oldest checkpoint that is kept, so that a replay can begin there; `input_log`
keeps more of it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from siltstone.errors import UsageError
from siltstone.times import as_utc

if TYPE_CHECKING:
    from siltstone.catalog.savepoints import SavepointRecord

_DURATION = re.compile(r"([0-9]+)([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_BUCKETS = {"hourly": "%Y-%m-%dT%H", "daily": "%Y-%m-%d", "weekly": "%G-W%V", "monthly": "%Y-%m"}
"""a rule -> what two times have in common that it keeps one of; also how its reason names it"""


def parse_duration(text: object) -> timedelta:
    """A length of time written as a whole number with its unit: 90s, 15m, 12h, 7d or 4w.

    Raises:
        UsageError: it is not one, or longer than 2.7 million years.
    """
    if isinstance(text, timedelta) and text >= timedelta(0):
        return text
    understood = _DURATION.fullmatch(text.strip()) if isinstance(text, str) else None
    try:
        if understood:
            return timedelta(**{_UNITS[understood[2]]: int(understood[1])})
    except (OverflowError, ValueError):
        pass
    raise UsageError(f"{text!r} is not a length of time: write it like 90s, 15m, 12h, 7d or 4w")


Duration = Annotated[timedelta, BeforeValidator(parse_duration)]
Count = Annotated[int, Field(ge=0)]


class RetentionOptions(BaseModel):
    """The rules of one stream's retention, None for a rule that is not set; unknown names are refused."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)

    keep_last: Count | None = Field(default=None, description="keep the newest N checkpoints")
    keep_within: Duration | None = Field(default=None, description="keep those committed so recently")
    keep_hourly: Count | None = Field(default=None, description="keep the newest of each of the last N hours")
    keep_daily: Count | None = Field(default=None, description="keep the newest of each of the last N days")
    keep_weekly: Count | None = Field(default=None, description="keep the newest of each of the last N weeks")
    keep_monthly: Count | None = Field(default=None, description="keep the newest of each of the last N months")
    keep_all: Literal[True] | None = Field(default=None, description="keep every one")
    min_count: Count = Field(default=0, description="keep the newest N whatever the rules say")
    min_age: Duration = Field(default=timedelta(0), description="keep those younger whatever the rules say")
    input_log: Duration = Field(
        default=timedelta(0),
        description="keep the input log so far back even where no checkpoint is left to replay from",
    )

    @property
    def rules(self) -> dict[str, int | timedelta]:
        """The rules that are set, by name."""
        named = {name: getattr(self, name) for name in type(self).model_fields if name.startswith("keep_")}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def described(self) -> str:
        """The rules and minimums that are set, for people."""
        return ", ".join(f"{name} {value}" for name, value in self.to_record().items()) or "keep everything"

    def to_record(self) -> dict[str, Any]:
        """As JSON that validates to the same options; what is not set is left out."""
        set_ = {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}
        return {
            name: f"{int(value.total_seconds())}s" if isinstance(value, timedelta) else value
            for name, value in set_.items()
            if value is not None
        }


NEW_STREAM = RetentionOptions(keep_last=100, keep_hourly=48, keep_daily=30)
"""what a new stream keeps until it is told otherwise"""


def retention_in_force(recorded: Mapping[str, Any] | None, given: RetentionOptions) -> RetentionOptions:
    """What a stream keeps: by the rules that are given, or else by those recorded with it (`to_record`)."""
    if given.rules or recorded is None:
        return given
    return RetentionOptions.model_validate({**recorded, **given.to_record()})


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """Ids, ascending: each checkpoint that is `kept`, with every reason, and those that are `subsumed`."""

    kept: dict[int, tuple[str, ...]]
    subsumed: tuple[int, ...]


def plan_retention(
    committed_at: Mapping[int, datetime],
    savepoints: Iterable["SavepointRecord"],
    options: RetentionOptions,
    now: datetime,
) -> RetentionPlan:
    """Tell apart what is kept and what is not.

    What one plan keeps, the next keeps too as long as time stands still, whatever else is gone by then.

    Args:
        committed_at: each checkpoint that is not deleted -> when it was committed, by clocks that may have jumped.
        savepoints: those of the stream, expired ones too; of checkpoints not in `committed_at` they mean nothing.
        options: the rules.
        now: the time to go by.

    Raises:
        UsageError: some would go, and not one is kept by a rule or a minimum.
    """
    newest_first = sorted(committed_at, reverse=True)
    reasons: dict[int, list[str]] = {id: [] for id in newest_first}
    if not options.rules:
        return RetentionPlan({id: ("no rule is set",) for id in reversed(newest_first)}, ())
    by_rule = [
        *_by_rules(newest_first, committed_at, options, now),
        *_by_minimums(newest_first, committed_at, options, now),
    ]
    pinned = [
        (s.checkpoint, f"savepoint {s.name}") for s in savepoints if not s.expired(now) and s.checkpoint in reasons
    ]
    for id, reason in [*((id, "newest") for id in newest_first[:1]), *pinned, *by_rule]:
        reasons[id].append(reason)
    kept = {id: tuple(why) for id, why in sorted(reasons.items()) if why}
    subsumed = tuple(id for id, why in sorted(reasons.items()) if not why)
    if subsumed and not by_rule:
        rules = ", ".join(f"{name} {value}" for name, value in options.rules.items())
        raise UsageError(
            f"these rules of retention keep none of {len(reasons)} checkpoints ({rules}): "
            "keep more, or name the checkpoints to delete (siltstone delete)"
        )
    return RetentionPlan(kept, subsumed)


def _by_rules(
    newest_first: Sequence[int], committed_at: Mapping[int, datetime], options: RetentionOptions, now: datetime
) -> Iterator[tuple[int, str]]:
    """What each rule keeps."""
    if options.keep_all:
        yield from ((id, "all") for id in newest_first)
    yield from ((id, "last") for id in newest_first[: options.keep_last or 0])
    if options.keep_within is not None:
        yield from ((id, "within") for id in newest_first if now - committed_at[id] <= options.keep_within)
    for rule, common in _BUCKETS.items():
        wanted, seen = getattr(options, f"keep_{rule}") or 0, set[str]()
        for id in newest_first:
            if len(seen) == wanted:
                break
            bucket = as_utc(committed_at[id]).strftime(common)
            if bucket not in seen:
                yield id, f"{rule} {bucket}"
                seen.add(bucket)


def _by_minimums(
    newest_first: Sequence[int], committed_at: Mapping[int, datetime], options: RetentionOptions, now: datetime
) -> Iterator[tuple[int, str]]:
    """What is kept whatever the rules say."""
    yield from ((id, "minimum count") for id in newest_first[: options.min_count])
    if options.min_age:  # or a clock that is behind would make one of what has yet to come
        yield from ((id, "minimum age") for id in newest_first if now - committed_at[id] < options.min_age)
