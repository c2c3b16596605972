"""The record of ratios: what is slower than it, and what the page shows."""

from pathlib import Path

import pytest

from benchmarks import recorded
from benchmarks.goals import Goal


@pytest.mark.slow  # it asks git for the commit
def test_what_got_slower_is_told_whichever_way_is_better(tmp_path: Path) -> None:
    """A ratio that is worse in each round by more than the noise; not one that nobody has a direction for."""
    before = [
        Goal.of_rounds("step", [0.5, 0.6], at_most=1.0),
        Goal.of_rounds("times", [3.0, 4.0], less_is_better=False),
        Goal("shown", 1.0),
        Goal("change", -0.5, at_most=-0.4),
    ]
    known = recorded.load(tmp_path / "none.json")
    recorded.add(known, "part", before)
    assert [each["what"] for each in known["part"]["ratios"]] == ["step", "times", "shown"]
    same = [Goal("step", 0.74, less_is_better=True), Goal("times", 2.5, less_is_better=False), Goal("shown", 9.0)]
    assert list(recorded.find_slower(known, "part", same)) == []
    slower = [Goal("step", 0.76, less_is_better=True), Goal("times", 2.3, less_is_better=False), Goal("new", 1, 1)]
    told = list(recorded.find_slower(known, "part", slower))
    assert [line.split(": ", 1)[1] for line in told] == ["step: 0.76, and 0.55 then", "times: 2.3, and 3.5 then"]
    assert list(recorded.find_slower(known, "part (quick)", slower)) == []
    recorded.add(known, "part", slower[:1])
    kept = [(each["what"], each["measured"]) for each in known["part"]["ratios"]]
    assert kept == [("step", 0.76), ("times", 3.5), ("shown", 1.0)]


@pytest.mark.slow  # so does this
def test_the_page_has_one_table_which_each_record_writes_anew(tmp_path: Path) -> None:
    path, page, known = tmp_path / "recorded.json", tmp_path / "page.md", recorded.Record()
    page.write_text("# How fast\n\n" + recorded.BEGIN)
    recorded.add(known, "step", [Goal.of_rounds("step / Spark", [0.5, 0.7, 0.6], at_most=0.55)])
    recorded.save(known, path, page)
    recorded.add(known, "step", [Goal("step / Spark", 0.5, at_most=0.55)])
    recorded.save(known, path, page)
    assert recorded.load(path) == known
    text = page.read_text()
    assert text.endswith(recorded.BEGIN + recorded.table(recorded.load(path)))
    assert text.startswith("# How fast\n\n" + recorded.BEGIN) and text.count("step / Spark") == 1
    assert "| step / Spark | <= 0.55 | 0.5 |  | met |\n" in text
    page.write_text("# How fast\n")
    with pytest.raises(ValueError, match="has no line"):
        recorded.save(known, path, page)


@pytest.mark.slow  # and this
def test_numbers_of_queries_and_systems_are_a_table_of_both() -> None:
    known = recorded.Record()
    goals = [
        Goal("events per second, q10, of Siltstone", 51_000.0),
        Goal("events per second, q2, of Siltstone", 257_400.0),
        Goal("events per second, q2, of Spark, RocksDB", 100_000.0),
        Goal("events per second, q2, beside Spark, RocksDB", 2.574, at_least=3),
        Goal("something else", 2.0),
    ]
    recorded.add(known, "part", goals)
    assert recorded.table(known).splitlines()[3:] == [
        "| events per second | Siltstone | Spark, RocksDB |",
        "|---|---|---|",
        "| q2 | 257k | 100k (2.57, goal 3: missed) |",
        "| q10 | 51k |  |",
        "",
        "| | goal | measured | rounds | |",
        "|---|---|---|---|---|",
        "| something else |  | 2 |  |  |",
    ]


def test_the_page_shows_what_is_recorded() -> None:
    assert recorded.PAGE.read_text().partition(recorded.BEGIN)[2] == recorded.table(recorded.load())
