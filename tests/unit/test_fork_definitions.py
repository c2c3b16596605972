"""Forks as people make them: whose definition runs one, what commands say, and that a mistake changes nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.fork import find_definition, fork
from siltstone.errors import UnknownStream, UsageError
from siltstone.retention.deletion import delete_checkpoints
from siltstone.run.definition import check_recorded
from siltstone.settings import Settings
from siltstone.sinks.parquet import ParquetSink
from siltstone.stream import Stream
from tests.command_line import plain, siltstone
from tests.fork_cases import NEW, names_of, stored, write_parent
from tests.sums import NAME, STREAM

MODULE = """
from siltstone.stream import Stream
from tests.orphans import STREAM
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parent's five checkpoints."""
    return write_parent(tmp_path_factory.mktemp("forks"))


def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, more: str = "") -> Settings:
    (tmp_path / f"{module}.py").write_text(MODULE + more)
    monkeypatch.syspath_prepend(tmp_path)
    return Settings(warehouse=str(tmp_path / "w"), streams=[module])


def test_a_fork_is_run_by_the_definition_of_the_stream_it_goes_back_to(
    place: OpenWarehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = project(tmp_path, monkeypatch, "defines_parent")
    fork(place, NAME, NEW, "3")
    fork(place, NEW, "again")
    for name in (NEW, "again"):
        found = find_definition(settings, name)
        assert (found.name, found.origin, found.operators) == (name, NAME, STREAM.operators)
        check_recorded(place.catalog, found, {})
    assert find_definition(settings, NAME) == STREAM
    with pytest.raises(UnknownStream, match="no stream 'nosuch' is defined"):
        find_definition(settings, "nosuch")
    with pytest.raises(UsageError, match=r"'\.\./x' is not a stream name"):
        find_definition(settings, "../x")
    elsewhere = settings.model_copy(update={"warehouse": str(tmp_path / "none")})
    with pytest.raises(UnknownStream, match=f"no stream '{NEW}' is defined"):
        find_definition(elsewhere, NEW)
    with pytest.raises(UsageError, match=rf"stream {NEW} is a fork, originally of {NAME}: give its definition"):
        check_recorded(place.catalog, replace(STREAM, name=NEW), {})


def test_a_fork_may_have_a_definition_of_its_own(
    place: OpenWarehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = f"OWN = Stream({NEW!r}, source=None, operators=STREAM.operators, max_parallelism=4)"
    settings = project(tmp_path, monkeypatch, "defines_both", more)
    assert find_definition(settings, NEW).origin is None
    fork(place, NAME, NEW, "3")
    found = find_definition(settings, NEW)
    assert (found.name, found.origin, found.source) == (NEW, NAME, None)


@pytest.mark.parametrize("sink", [ParquetSink("/elsewhere"), lambda rows, checkpoint: None])
def test_a_fork_never_writes_to_the_sinks_of_the_other(sink: Any) -> None:
    operator = replace_output(STREAM)
    stream = replace(STREAM, operators=[operator], sinks={"by_key": sink})
    with pytest.raises(UsageError, match=rf"{NEW} is a fork of {NAME} and would write to its sink of by_key: define"):
        stream.as_fork(NEW, NAME)
    assert replace(stream, name=NEW).as_fork(NEW, NAME).sinks == {"by_key": sink}
    assert replace(stream, sinks={"by_key": ParquetSink()}).as_fork(NEW, NAME).origin == NAME


def replace_output(stream: Stream) -> Any:
    import pyarrow as pa

    [operator] = stream.operators
    return type("WithOutput", (type(operator),), {"output": pa.schema([("k", pa.int64())])})(name="by_key")


# The command line


@pytest.mark.slow
def test_the_commands_say_where_a_fork_comes_from(place: OpenWarehouse, tmp_path: Path) -> None:
    options = ("--warehouse", tmp_path / "w")
    before = stored(place)
    digest = place.catalog.checkpoints.get(NAME, 3).digest
    made = siltstone("fork", NAME, NEW, "--at", 3, *options, "--json").json
    assert list(made) == ["stream", "forked_from", "forked_at", "digest", "objects", "bytes"]
    assert (made["stream"], made["forked_from"], made["forked_at"], made["digest"]) == (NEW, NAME, 3, digest)
    assert siltstone("savepoint", NAME, "stable", "--at", 2, *options).code == 0
    [line] = plain(siltstone("fork", NAME, "stable-too", "--at", "stable", *options))
    assert line.startswith(
        f"stable-too: forked from {NAME} at checkpoint 2, shares {len(names_of(place, 'stable-too'))} objects, "
    )
    assert stored(place) == before
    listed = siltstone("checkpoints", NEW, *options, "--json").json
    assert (listed["forked_from"], listed["forked_at"]) == (NAME, 3)
    assert [c["id"] for c in listed["checkpoints"]] == [3]
    shown = siltstone("show", NEW, "latest", *options, "--json").json
    assert (shown["stream"], shown["forked_from"], shown["forked_at"], shown["chain"]) == (NEW, NAME, 3, [1, 2, 3])
    for command in (("checkpoints", NEW), ("show", NEW, "3")):
        assert plain(siltstone(*command, *options))[0] == f"{NEW} was forked from {NAME} at checkpoint 3"
    assert siltstone("checkpoints", NAME, *options, "--json").json["forked_from"] is None
    assert "forked" not in siltstone("checkpoints", NAME, *options).out


MISTAKES: list[tuple[str, tuple[str, ...]]] = [
    (f"fork {NAME}", ("Missing argument 'NEW'",)),
    (f"fork nosuch {NEW}", ("no stream 'nosuch' in this catalog: it has idle, sums, taken",)),
    (f"fork ../x {NEW}", ("'../x' is not a stream name",)),
    (f"fork idle {NEW}", ("stream idle: it has none yet, run it first",)),
    (f"fork {NAME} taken", ("stream taken exists already: give the fork another name",)),
    (f"fork {NAME} idle", ("stream idle exists already",)),
    (f"fork {NAME} {NAME}", (f"stream {NAME} exists already",)),
    (f"fork {NAME} ../x", ("'../x' is not a stream name",)),
    (f"fork {NAME} What-If", ("'What-If' is not a stream name",)),
    (f"fork {NAME} {'n' * 65}", ("is not a stream name", "at most 64")),
    (f"fork {NAME} {NEW} --at 9", (f"no checkpoint 9 of stream {NAME}: it has 4, 2 to 5",)),
    (f"fork {NAME} {NEW} --at 1", ("no checkpoint 1",)),
    (f"fork {NAME} {NEW} --at 0", ("no checkpoint 0",)),
    (f"fork {NAME} {NEW} --at 99999999999999999999999", ("no checkpoint",)),
    (f"fork {NAME} {NEW} --at nightly", ("'nightly' is not a checkpoint: use latest, an id, a savepoint",)),
    (f"fork {NAME} {NEW} --at 2001-01-01", ("no checkpoint as old as 2001-01-01",)),
    (f"fork {NAME} {NEW} --warehouse missing", ("no warehouse at", "missing")),
]


@pytest.mark.slow
def test_a_mistake_is_one_line_and_changes_nothing(place: OpenWarehouse, tmp_path: Path) -> None:
    place.catalog.streams.register("idle", 4, {})
    fork(place, NAME, "taken", "2")
    delete_checkpoints(place, NAME, [1])

    def contents() -> tuple[Any, ...]:
        catalog = place.catalog
        names = [s.name for s in catalog.streams.list()]
        each = [
            (catalog.checkpoints.list_retained(n), catalog.objects.list(n), catalog.input_log.list(n, 99))
            for n in names
        ]
        return catalog.streams.list(), each, stored(place)

    before = contents()
    for line, said in MISTAKES:
        options = () if "--warehouse" in line else ("--warehouse", tmp_path / "w")
        siltstone(*line.split(), *options).failed(2, *said)
        assert contents() == before, line
