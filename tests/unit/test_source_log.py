"""Spark's record of its sources, as kept and laid out anew, against Spark's own rules for its file source's log.

The rules are those of `CompactibleFileStreamLog`: every so many entries one file holds all entries up to there, and
how many that is follows from the newest such file there is.
"""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from siltstone.catalog.records.source_entries import NO_BATCH, LoggedFile, decode_offsets, merge
from siltstone.catalog.records.steps import BEFORE_FIRST, InputPosition, Step
from siltstone.errors import StateError, UsageError
from siltstone.spark.source_log import RecordForm, SourceLog, span

ENTRIES = 64


def entry(n: int) -> str:
    return json.dumps({"path": f"file:///in/{n}.parquet", "timestamp": n, "batchId": n}, separators=(",", ":"))


def after(steps: Sequence[Step], beginning: Step | None = None) -> InputPosition:
    """What the catalog says of the position after these steps."""
    return InputPosition(beginning, [step for step in steps if step.sources != "{}"], steps[-2:])


def numbers(directory: Path) -> tuple[list[int], list[int]]:
    """Of the plain entries, and of those that hold all before them."""
    names = [path.name for path in directory.iterdir()]
    plain = sorted(int(name) for name in names if name.isdigit())
    return plain, sorted(int(name.removesuffix(".compact")) for name in names if name.endswith(".compact"))


def interval(directory: Path, default: int = 10) -> int:
    """What Spark takes the interval to be (`deriveCompactInterval`)."""
    _, compact = numbers(directory)
    if not compact or compact[-1] + 1 <= default:
        return compact[-1] + 1 if compact else default
    size = compact[-1] + 1
    if default < size // 2:
        return next((i for i in range(default, size // 2 + 1) if size % i == 0), size)
    return size


def spark_reads(directory: Path, default: int = 10) -> list[str]:
    """All entries, found as Spark finds them (`getAllValidBatches`)."""
    every = interval(directory, default)
    newest = max(n for part in numbers(directory) for n in part)
    lines = []
    for n in range(max(0, (newest + 1) // every * every - 1), newest + 1):
        name = f"{n}.compact" if (n + 1) % every == 0 else str(n)
        header, *rest = (directory / name).read_text().split("\n")
        assert header == "v1"
        lines += rest
    return lines


def spark_writes(directory: Path, n: int, default: int = 10) -> None:
    """The next entry, written as Spark writes it."""
    directory.mkdir(parents=True, exist_ok=True)
    before = spark_reads(directory, default) if n else []
    if (n + 1) % interval(directory, default) == 0:
        (directory / f"{n}.compact").write_text("\n".join(["v1", *before, entry(n)]))
    else:
        (directory / str(n)).write_text(f"v1\n{entry(n)}")


def spark_runs(log: SourceLog, batch: int, every: int = 10) -> Step:
    spark_writes(log.location / "sources" / "0", batch, every)
    offsets = log.location / "offsets" / str(batch)
    offsets.parent.mkdir(parents=True, exist_ok=True)
    offsets.write_text(f'v1\n{{"batchWatermarkMs":{batch}}}\n{{"logOffset":{batch}}}')
    return log.read(batch, batch + 1)


@pytest.mark.parametrize("batches", [1, 3, 7, 10, 11, 25])
@pytest.mark.parametrize("intervals", [(10,), (1,), (3,), (5,), (2, 10, 7)], ids=str)
def test_spark_finds_every_file_again_after_any_number_of_runs(
    intervals: tuple[int, ...], batches: int, tmp_path: Path
) -> None:
    """Each run has the next of these settings `spark.sql.streaming.fileSource.log.compactInterval`."""
    steps: list[Step] = []
    for run in range(ENTRIES // batches):
        every = intervals[run % len(intervals)]
        log = SourceLog(tmp_path / str(run), form=RecordForm(compact_interval=every))
        log.prepare(after(steps))
        if steps:
            assert spark_reads(log.location / "sources" / "0", every) == [entry(n) for n in range(len(steps))]
            newest = [str(n) for n in range(max(0, len(steps) - 2), len(steps))]
            for part in ("offsets", "commits"):
                assert sorted(p.name for p in (log.location / part).iterdir()) == sorted(newest)
            assert json.loads((log.location / "commits" / newest[-1]).read_text().split("\n")[1]) == {
                "nextBatchWatermarkMs": len(steps) - 1
            }
        steps += [spark_runs(log, batch, every) for batch in range(len(steps), len(steps) + batches)]
        # A batch that is in no checkpoint leaves nothing behind.
        spark_runs(log, len(steps), every)
    assert [json.loads(step.sources) for step in steps] == [
        {"0": {str(n): f"v1\n{entry(n)}"}} for n in range(len(steps))
    ]


@pytest.mark.parametrize("text", ['\0v1\n{"topic":{"0":17,"1":4}}', "v1\n1700000000000"], ids=["Kafka", "rate"])
def test_the_first_offsets_of_other_sources_come_back_as_they_were(text: str, tmp_path: Path) -> None:
    log = SourceLog(tmp_path / "a")
    log.prepare(after([]))
    first = log.location / "sources" / "0" / "0"
    first.parent.mkdir(parents=True)
    first.write_text(text)
    (log.location / "offsets").mkdir()
    steps = []
    for batch in range(12):
        (log.location / "offsets" / str(batch)).write_text(f'v1\n{{"batchWatermarkMs":0}}\n{batch}')
        steps.append(log.read(batch, batch + 1))
    again = SourceLog(tmp_path / "b")
    again.prepare(after(steps))
    assert {p.name: p.read_text() for p in (again.location / "sources" / "0").iterdir()} == {"0": text}


def test_a_query_elsewhere_is_noticed(tmp_path: Path) -> None:
    log = SourceLog(tmp_path)
    log.prepare(after([]))
    with pytest.raises(StateError, match="no record of batch 0"):
        log.read(0, 1)


def reruns(log: SourceLog, step: Step, planned: bool) -> None:
    """A logged batch, laid out as the newest; then Spark may have gone on to plan the next before it was stopped."""
    log.rerun(step)
    assert spark_reads(log.location / "sources" / "0") == [entry(n) for n in range(step.batch_id + 1)]
    found = {p.name: p.read_text() for p in (log.location / "offsets").iterdir()}
    assert found[str(step.batch_id)] == step.offsets and max(map(int, found)) == step.batch_id
    commits = [int(p.name) for p in (log.location / "commits").glob("*")]
    assert max(commits, default=-1) == step.batch_id - 1
    if planned:
        (log.location / "commits").mkdir(exist_ok=True)
        (log.location / "commits" / str(step.batch_id)).write_text("v1\n{}")
        (log.location / "offsets" / str(step.batch_id + 1)).write_text("v1\n{}\nanother")
        spark_writes(log.location / "sources" / "0", step.batch_id + 1)


@pytest.mark.parametrize("begin", [0, 1, 9, 10, 23])
@pytest.mark.parametrize("planned", [False, True])
def test_spark_runs_logged_batches_again_whatever_it_planned(begin: int, planned: bool, tmp_path: Path) -> None:
    first = SourceLog(tmp_path / "first")
    first.prepare(after([]))
    steps = [spark_runs(first, batch) for batch in range(42)]
    again = SourceLog(tmp_path / "again")
    again.prepare(after(steps[:begin]))
    for step in steps[begin:]:
        reruns(again, step, planned)


def test_batches_without_new_entries_come_again(tmp_path: Path) -> None:
    steps = [
        Step(n + 1, n, f'v1\n{{"batchWatermarkMs":{n}}}\n{n}', "{}" if n else '{"0":{"0":"v1\\n17"}}') for n in range(3)
    ]
    log = SourceLog(tmp_path)
    log.prepare(after([]))
    for step in steps:
        log.rerun(step)
        assert (tmp_path / "sources" / "0" / "0").read_text() == "v1\n17"
    assert json.loads((tmp_path / "commits" / "1").read_text().split("\n")[1]) == {"nextBatchWatermarkMs": 1}


def test_the_files_of_a_batch_are_known_and_other_sources_have_none(tmp_path: Path) -> None:
    entries = {"0": {"7": f"v1\n{entry(7)}\n{entry(8)}"}, "1": {"0": "v1\n17"}}
    found = SourceLog(tmp_path).files_of(Step(1, 0, "v1\n{}\n", json.dumps(entries)))
    assert [file.path for file in found] == ["file:///in/7.parquet", "file:///in/8.parquet"]
    assert [file.size for file in found] == [None, None]


def test_sizes_are_recorded_with_files_and_spark_does_not_see_them(tmp_path: Path) -> None:
    log = SourceLog(tmp_path / "a", ("/in", "/in"))
    log.prepare(after([]))
    spark_writes(log.location / "sources" / "0", 0)
    (log.location / "offsets").mkdir()
    (log.location / "offsets" / "0").write_text("v1\n{}\n0")
    written = (log.location / "sources" / "0" / "0").read_text()
    [path] = [file.path for file in log.files_of(Step(1, 0, sources=json.dumps({"0": {"0": written}})))]
    step = log.read(0, 1, lambda: {path: 4096, "file:///other": 1})
    assert '"size":4096}' in json.loads(step.sources)["0"]["0"] and "{warehouse}" in step.sources
    again = SourceLog(tmp_path / "b", ("/moved", "/moved"))
    again.prepare(after([step]))
    assert (again.location / "sources" / "0" / "0").read_text() == written.replace("file:///in", "file:///moved")
    assert [(file.path, file.size) for file in again.files_of(step)] == [(path.replace("/in", "/moved"), 4096)]


def spark_gets(directory: Path, n: int, default: int = 10) -> list[str]:
    """The paths of one entry, found as Spark finds them (`FileStreamSourceLog.get`)."""
    name = f"{n}.compact" if (n + 1) % interval(directory, default) == 0 else str(n)
    _, *lines = (directory / name).read_text().split("\n")
    return [line["path"] for line in map(json.loads, lines) if line["batchId"] == n]


@pytest.mark.parametrize("bad", [0, 8, 9, 10])
@pytest.mark.parametrize("every", [1, 3, 10])
def test_a_batch_is_run_without_a_file_which_stays_seen(tmp_path: Path, bad: int, every: int) -> None:
    log, sources = SourceLog(tmp_path / "a", form=RecordForm(compact_interval=every)), tmp_path / "a" / "sources" / "0"
    log.prepare(after([]))
    name, steps = f"file:///in/{bad}.parquet", list[Step]()

    def reason(file: LoggedFile) -> str | None:
        return 'cut: "gzip"' if file.path == name else None

    for batch in range(13):
        offsets = log.location / "offsets" / str(batch)
        spark_writes(sources, batch, every)
        offsets.parent.mkdir(exist_ok=True)
        offsets.write_text("v1\n{}\n0")
        (sources / f".{batch}.crc").write_text("of Hadoop")
        assert log.reduce(batch, reason) is (batch == bad)
        log.write_reduced()
        assert not log.reduce(batch, reason)
        steps.append(log.read(batch, batch + 1))
        assert spark_gets(sources, batch, every) == ([] if batch == bad else [f"file:///in/{batch}.parquet"])
    [found] = [file for step in steps for file in log.unread_of(step)]
    assert found == LoggedFile(name, bad, None, 'cut: "gzip"') and log.unread_of(steps[bad]) == [found]
    # The same from the catalog, its steps pruned or not, and each step by itself.
    pruned = Step(0, BEFORE_FIRST, "v1\n{}\n-", merge(step.sources for step in steps[:9]))
    for position in (after(steps), after(steps[9:], pruned)):
        again = SourceLog(tmp_path / "b", form=RecordForm(compact_interval=every))
        again.prepare(position)
        read = [json.loads(line) for line in spark_reads(tmp_path / "b" / "sources" / "0", every)]
        assert [line["path"] for line in read] == [f"file:///in/{n}.parquet" for n in range(13)]
        assert {line["batchId"] for line in read} == {*range(13), NO_BATCH} - {bad} and "unread" not in read[0]
    again = SourceLog(tmp_path / "c", form=RecordForm(compact_interval=every))
    again.prepare(after(steps[:bad]))
    again.rerun(steps[bad])
    assert spark_gets(tmp_path / "c" / "sources" / "0", bad, every) == []


# Where sources begin

HEADER = 'v1\n{"batchWatermarkMs":0,"conf":{"spark.sql.shuffle.partitions":"2"}}'


def begun(log: SourceLog, *starts: str | None) -> Step:
    """Spark runs batch 0 of a Kafka source, one in Python and one of files; the beginning, read meanwhile."""
    log.prepare(after([]))
    for source, text in (("0", '\0v1\n{"topic":{"0":17}}'), ("2", f"v1\n{entry(0)}")):
        path = log.location / "sources" / source / "0"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (log.location / "offsets").mkdir()
    (log.location / "offsets" / "0").write_text(f'{HEADER}\n{{"topic":{{"0":20}}}}\n{{"n":8}}\n{{"logOffset":0}}')
    return log.read_beginning(starts)


def test_where_each_source_begins_is_read_from_its_log_or_from_the_batch(tmp_path: Path) -> None:
    log = SourceLog(tmp_path)
    beginning = begun(log, '{"topic":{"0":17}}', '{\n "n": 5\n}', None)
    assert (beginning.step, beginning.batch_id) == (0, BEFORE_FIRST)
    assert beginning.offsets == f'{HEADER}\n-\n{{"n": 5}}\n-'
    assert json.loads(beginning.sources) == {"0": {"0": '\0v1\n{"topic":{"0":17}}'}}
    assert json.loads(log.read(0, 1).sources) == {"2": {"0": f"v1\n{entry(0)}"}}, "the files are what batch 0 read"


def test_where_named_sources_begin_is_written_with_their_names(tmp_path: Path) -> None:
    log = SourceLog(tmp_path)
    log.prepare(after([]))
    kept = log.location / "sources" / "clicks" / "0"
    kept.parent.mkdir(parents=True)
    kept.write_text('\0v1\n{"topic":{"0":17}}')
    header = HEADER.replace("v1", "v2", 1)
    (log.location / "offsets").mkdir()
    (log.location / "offsets" / "0").write_text(f'{header}\norders:{{"n":8}}\nclicks:{{"topic":{{"0":20}}}}')
    starts = ['{"topic":{"0":17}}', '{"n":5}', None]
    beginning = log.read_beginning(starts, ["clicks", "orders", "files"])
    assert beginning.offsets == f'{header}\nclicks:-\norders:{{"n":5}}\nfiles:-'
    assert decode_offsets(beginning.offsets) == {"clicks": "-", "orders": '{"n":5}', "files": "-"}
    assert json.loads(span(beginning, log.read(0, 1)))["to"] == {"orders": {"n": 8}, "clicks": {"topic": {"0": 20}}}


def test_a_source_that_is_used_twice_has_an_offset_for_each_use(tmp_path: Path) -> None:
    """Spark gives both the number of the last, and expects as many offsets as uses."""
    log = SourceLog(tmp_path)
    log.prepare(after([]))
    (log.location / "offsets").mkdir()
    (log.location / "offsets" / "0").write_text(f'{HEADER}\n{{"n":8}}\n{{"n":8}}')
    assert log.read_beginning(['{"n":5}', '{"n":5}'], ["1", "1"]).offsets == f'{HEADER}\n{{"n":5}}\n{{"n":5}}'


NAMED = HEADER.replace("v1", "v2", 1)


@pytest.mark.parametrize(
    ("offsets", "names", "refused"),
    [
        (f"{NAMED}\na:1\nb:2", ["b", "a"], False),
        (f"{NAMED}\na:1\nb:2", ["a"], True),
        (f"{NAMED}\na:1", ["a", "b"], True),
        (f"{NAMED}\n0:1\n1:2", ["1", "0"], False),
        (f"{NAMED}\n0:1\n1:2", ["0"], True),
        (f"{NAMED}\n1:2", ["1", "1"], False),
        (f"{HEADER}\n1\n2", ["0", "1"], False),
        (f"{HEADER}\n1\n2", ["1", "1"], False),
        (f"{HEADER}\n1\n2", None, False),
    ],
)
def test_a_query_has_the_named_sources_of_its_record(
    offsets: str, names: list[str] | None, refused: bool, tmp_path: Path
) -> None:
    log = SourceLog(tmp_path)
    with pytest.raises(UsageError, match=r"a, b|recorded with") if refused else nullcontext():
        log.check_names(names, Step(1, 0, offsets, "{}"))


def test_names_given_to_sources_later_are_refused(tmp_path: Path) -> None:
    log = SourceLog(tmp_path)
    log.prepare(after([spark_runs(SourceLog(tmp_path / "before"), 0)]))
    step = Step(1, 0, f"{HEADER}\n1", "{}")
    log.check_names(["0"], step)
    with pytest.raises(UsageError, match=r"are clicks, .* recorded with 0: "):
        log.check_names(["clicks"], step)


@pytest.mark.parametrize("version", ["1", "2"])
def test_a_commit_has_the_version_that_the_session_writes(version: str, tmp_path: Path) -> None:
    log = SourceLog(tmp_path / "b", form=RecordForm(commit_version=version))
    log.prepare(after([spark_runs(SourceLog(tmp_path / "a"), 0)]))
    assert (log.location / "commits" / "0").read_text() == f'v{version}\n{{"nextBatchWatermarkMs": 0}}'


def test_a_record_of_a_later_spark_is_refused_by_name(tmp_path: Path) -> None:
    log = SourceLog(tmp_path, form=RecordForm(offset_versions=("v1",)))
    with pytest.raises(UsageError, match=r"step 1, of version v2: run the stream with the version of Spark"):
        log.prepare(after([Step(1, 0, f"{NAMED}\na:1", "{}")]))


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    assert decode_offsets(f'{NAMED}\na:{{"x":"\u2028b:c"}}\nb:-\n') == {"a": '{"x":"\u2028b:c"}', "b": "-"}


def test_a_version_of_the_offset_log_that_is_not_known_is_refused(tmp_path: Path) -> None:
    log = SourceLog(tmp_path)
    (log.location / "offsets").mkdir()
    (log.location / "offsets" / "0").write_text(HEADER.replace("v1", "v3", 1))
    with pytest.raises(UsageError, match=r"'v3'.*offsetLog.formatVersion to 1"):
        log.check(0)


def test_an_epoch_before_the_first_checkpoint_begins_where_the_first_one_did(tmp_path: Path) -> None:
    beginning = begun(SourceLog(tmp_path / "a"), None, '{"n":5}', None)
    log = SourceLog(tmp_path / "b")
    log.prepare(after([], beginning))
    assert (log.number(0), log.batch(1)) == (1, 0), "Spark's batch 0 is what ends where the sources begin"
    for part in ("offsets", "commits"):
        assert [p.name for p in (tmp_path / "b" / part).iterdir()] == ["0"]
    assert (tmp_path / "b" / "offsets" / "0").read_text() == beginning.offsets
    assert (tmp_path / "b" / "sources" / "0" / "0").read_text() == '\0v1\n{"topic":{"0":17}}'
    assert not (tmp_path / "b" / "sources" / "2").exists()
    (tmp_path / "b" / "offsets" / "1").write_text(f"{HEADER}\nbatch 0")
    assert log.read(0, 1) == Step(1, 0, f"{HEADER}\nbatch 0")


def test_batch_0_comes_again_from_the_beginning(tmp_path: Path) -> None:
    beginning = begun(SourceLog(tmp_path / "a"), None, '{"n":5}', None)
    steps = [Step(n + 1, n, f"{HEADER}\n-\n{n}\n-") for n in range(3)]
    log = SourceLog(tmp_path / "b")
    log.prepare(after([], beginning))
    for step in steps:
        log.rerun(step)
        found = {p.name: p.read_text() for p in (tmp_path / "b" / "offsets").iterdir()}
        before = beginning if step.batch_id == 0 else steps[step.batch_id - 1]
        assert found[str(step.batch_id)] == before.offsets and found[str(step.batch_id + 1)] == step.offsets
        assert max(int(p.name) for p in (tmp_path / "b" / "commits").iterdir()) == step.batch_id
    log.prepare(after(steps, beginning))
    assert log.number(3) == 3, "once there are steps, they say where to go on"


def test_a_source_that_keeps_its_beginning_itself_needs_no_batch_of_its_own(tmp_path: Path) -> None:
    beginning = begun(SourceLog(tmp_path / "a"), '{"topic":{"0":17}}', None, None)
    log = SourceLog(tmp_path / "b")
    log.prepare(after([], beginning))
    assert log.number(0) == 0 and not (tmp_path / "b" / "offsets").exists()
    assert (tmp_path / "b" / "sources" / "0" / "0").exists()


# A warehouse that is moved


@pytest.mark.parametrize("slashes", ["", "//"])
def test_files_of_a_warehouse_that_was_moved_are_seen_where_they_are_now(slashes: str, tmp_path: Path) -> None:
    def lines(warehouse: str, resolved: str) -> str:
        paths = [f"{warehouse}/source/a.parquet", f"{resolved}/source/b.parquet", "/old/wide/c.parquet", "/elsewhere"]
        return "\n".join(
            ["v1", *(f'{{"path":"file:{slashes}{path}","timestamp":{n},"batchId":0}}' for n, path in enumerate(paths))]
        )

    old = SourceLog(tmp_path / "a", ("/old/w", "/mnt/old%20disk/w"))
    old.prepare(after([]))
    text = lines("/old/w", "/mnt/old%20disk/w")
    for path, content in (("sources/0/0", text), ("offsets/0", "v1\n{}\n0")):
        (old.location / path).parent.mkdir(parents=True)
        (old.location / path).write_text(content)
    step = old.read(0, 1)
    recorded = json.loads(step.sources)["0"]["0"]
    assert recorded == lines("{warehouse}", "{warehouse-resolved}")
    for warehouse, seen in (
        (("/new/w", "/new/w"), lines("/new/w", "/new/w")),
        (("/old/w", "/mnt/old%20disk/w"), text),
    ):
        log = SourceLog(tmp_path / "b", warehouse)
        log.prepare(after([step]))
        assert (log.location / "sources" / "0" / "0").read_text() == seen
        assert log.files_of(step)[0].path == f"file:{slashes}{warehouse[0]}/source/a.parquet"


def test_files_that_were_recorded_by_their_whole_paths_stay_as_they_are(tmp_path: Path) -> None:
    step = Step(1, 0, "v1\n{}\n0", json.dumps({"0": {"0": f"v1\n{entry(0)}"}}))
    log = SourceLog(tmp_path / "b", ("/in", "/in"))
    log.prepare(after([step]))
    assert (log.location / "sources" / "0" / "0").read_text() == f"v1\n{entry(0)}"
