"""Law: a broadcast table is that of a dict, in every subtask, whatever happens to the run."""

import shutil
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as s

from siltstone.testing import StreamTester
from tests.examples import examples
from tests.tester_actions import act, action
from tests.unit.test_broadcast import card_tester, payment, rule

COUNTRIES = ("de", "at", "ch", "fr", "nl", "be")
rules = s.lists(
    s.builds(rule, s.sampled_from(COUNTRIES), s.integers(0, 3), s.integers(0, 4), s.sampled_from([None, False, True])),
    max_size=6,
)
PAYMENTS = [payment(card, country, 2) for card, country in enumerate(COUNTRIES * 2)]


class Oracle:
    """What the table holds: of each country the newest rule, and of several newest ones the least."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[Any, ...]] = {}

    def take(self, given: list[dict[str, Any]]) -> None:
        for row in given:
            order = (-row["version"], row["limit"], row["gone"] is None, bool(row["gone"]))
            self.rows[row["country"]] = min(order, self.rows.get(row["country"], order))

    def limits(self) -> dict[str, int]:
        return {country: limit for country, (_, limit, _, gone) in self.rows.items() if not gone}


def harm(t: StreamTester, what: str, saved: Path, subtask: int) -> None:
    """Remove one subtask's working state, or put an older copy of it in its place; the first time, save that."""
    epoch = t._region.epoch  # noqa: SLF001
    state = t._place.warehouse.local.state("cards", epoch, "checked", subtask)  # noqa: SLF001
    copy = saved / f"{epoch}-{t.parallelism}-{subtask}"
    if not what or not state.exists():
        return
    if what == "lose":
        shutil.rmtree(state)
    elif copy.exists():
        shutil.rmtree(state)
        shutil.copytree(copy, state)
    else:
        shutil.copytree(state, copy)


@settings(max_examples=examples(60))
@given(
    s.lists(s.tuples(rules, s.booleans(), s.sampled_from(["", "lose", "set back"]), action), min_size=1, max_size=8),
    s.sampled_from(["heap", "rocksdb"]),
    s.integers(1, 3),
    s.integers(1, 4),
)
def test_every_subtask_has_the_table_of_a_dict(
    tmp_path_factory: Any, steps: list[Any], backend: str, parallelism: int, every: int
) -> None:
    oracle, saved = Oracle(), tmp_path_factory.mktemp("saved")
    with card_tester(parallelism, backend=backend, checkpoint_every=every) as t:
        for number, (came, pays, what, then) in enumerate(steps):
            oracle.take(came)
            out = t.step({"rules": came, "payments": PAYMENTS if pays else []})["checked"].to_pylist()
            expected = oracle.limits()
            assert len(out) == (len(PAYMENTS) if pays else 0)
            for row in out:
                country = PAYMENTS[row["card"]]["country"]
                assert (row["limit"], row["rules"]) == (expected.get(country), len(expected))
            harm(t, what, saved, number % t.parallelism)
            act(t, then, number, 3)
        t.checkpoint()
        assert t.state("checked", "rules").num_rows == len(oracle.rows)
        t.replay()
