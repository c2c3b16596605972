"""The metrics of a run, from the steps of a real region."""

import io
import socket
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.background import MaterializationEvent
from siltstone.chains.policies import policy_by_name
from siltstone.changelog.upload_metrics import UploadStatistics, openmetrics
from siltstone.errors import UsageError
from siltstone.run.progress import RunProgress
from siltstone.run.region import Completed
from siltstone.settings import Settings, load_settings, parse_address
from siltstone.spark.operations.run_metrics import RunMetrics
from tests.region_run import RegionRun
from tests.tiny_stream import MAX_PARALLELISM, NAME, STREAM, rows_of

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


class Watched:
    """A run whose progress is counted as the runner counts it; each value of `get` is of one exposition."""

    def __init__(self, place: OpenWarehouse) -> None:
        self.place, self.time = place, BEGAN
        self.progress = RunProgress(NAME, lambda: self.time)
        self.batch = 0
        self.open()

    def open(self) -> None:
        """Begin a writer epoch."""
        policy = policy_by_name("marginal-cost")
        self.run = RegionRun(self.place, STREAM, policy, parallelism=MAX_PARALLELISM, checkpoint_steps=2)
        newest = self.run.region.completed
        self.progress.begin_epoch(self.place.catalog.checkpoints.get(NAME, newest) if newest else None)
        self.run.attempt = self._attempt

    def _attempt(self, task, rows):
        output, received = RegionRun.attempt(self.run, task, rows)
        self.progress.add_step({task.operator.name: received}, moves=1)
        return output, received

    def step(self) -> Completed | None:
        """Run one step; count its checkpoint."""
        self.batch += 1
        completed = self.run.step(rows_of(self.batch))
        if completed is not None:
            self.progress.add_checkpoint(completed)
        return completed

    def get(self, sample: str, /, **labels: str) -> float | None:
        """Ask for one sample."""
        text = openmetrics(UploadStatistics(), {"stream": NAME}, self.progress.families())
        found = {
            (s.name, tuple(sorted(s.labels.items()))): s.value
            for family in text_string_to_metric_families(text)
            for s in family.samples
        }
        return found.get((sample, tuple(sorted({"stream": NAME, **labels}.items()))))


@pytest.fixture
def watched(tmp_path: Path):
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        yield Watched(place)


def test_lag_is_what_no_completed_checkpoint_has(watched: Watched) -> None:
    assert watched.get("siltstone_checkpoint_age_seconds") is None, "there is none yet"
    watched.time += timedelta(seconds=5)
    watched.step()
    first = rows_of(1).num_rows
    assert watched.get("siltstone_run_age_seconds") == 5
    assert watched.get("siltstone_uncommitted_steps") == 1
    assert watched.get("siltstone_uncommitted_input_rows", operator="tiny") == first
    completed = watched.step()
    assert completed is not None
    watched.time += timedelta(seconds=30)
    assert watched.get("siltstone_uncommitted_steps") == 0
    assert watched.get("siltstone_uncommitted_input_rows", operator="tiny") == 0
    assert watched.get("siltstone_checkpoint_age_seconds") == 30
    assert watched.get("siltstone_step_input_rows", operator="tiny") == rows_of(2).num_rows
    assert watched.get("siltstone_input_rows_total", operator="tiny") == first + rows_of(2).num_rows
    assert watched.get("siltstone_state_rows", operator="tiny") == completed.state_rows
    assert watched.get("siltstone_event_time_lag_seconds") is None, "the stream has no event time"


def test_the_newest_checkpoint_is_described(watched: Watched) -> None:
    watched.step()
    completed = watched.step()
    assert completed is not None
    record = watched.place.catalog.checkpoints.get_latest(NAME)
    assert watched.get("siltstone_checkpoints_total") == watched.get("siltstone_checkpoint_id") == record.id == 1
    assert watched.get("siltstone_checkpoint_bytes") == record.bytes
    assert watched.get("siltstone_checkpoint_seconds") == completed.seconds
    assert watched.get("siltstone_checkpoint_d", operator="tiny") == record.d["tiny"]
    for form in ("base", "delta"):
        is_it = float(record.forms["tiny"] == form)
        assert watched.get("siltstone_checkpoint_form", operator="tiny", form=form) == is_it


def test_log_and_materialization_are_told_apart(watched: Watched) -> None:
    """FLIP-158's two parts: their sizes in the chain (Flink's `lastFullSizeOf...`), and in the checkpoint alone."""

    def parts(name: str) -> tuple[float | None, ...]:
        return tuple(watched.get(name, operator="tiny", part=part) for part in ("materialized", "log"))

    for _ in range(2):
        watched.step()
    base, index = parts("siltstone_checkpoint_part_bytes")
    assert base and index and index < base and parts("siltstone_chain_bytes") == (base, index)
    for _ in range(2):
        watched.step()
    form = watched.place.catalog.checkpoints.get_latest(NAME).forms["tiny"]
    whole, new = parts("siltstone_chain_bytes"), parts("siltstone_checkpoint_part_bytes")
    assert form == "delta" and whole[0] == base and new[1] and whole[1] == index + new[1]
    assert new[0] < base, "the opaque variable alone, which changes in each step"


def test_materializations_of_the_run_are_counted(watched: Watched) -> None:
    name, events = "siltstone_materializations_total", MaterializationEvent
    for event, seconds in ((events.STARTED, 0.0), (events.COMPLETED, 2.5), (events.STARTED, 0.0), (events.FAILED, 9.0)):
        watched.progress.add_materialization("tiny", event, seconds)
    counted = [watched.get(name, operator="tiny", event=event) for event in events]
    assert counted == [2, 1, 1, None]
    assert watched.get("siltstone_materialization_seconds", operator="tiny") == 2.5


def test_counts_go_on_after_a_reset(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit of the second checkpoint gets no answer, and the next epoch finds it in the catalog."""
    for _ in range(2):
        watched.step()
    restores = watched.get("siltstone_restores_total", operator="tiny")
    assert restores == 0, "an empty stream restores nothing"
    watched.step()
    with monkeypatch.context() as patch:
        patch.setattr(watched.progress, "add_checkpoint", lambda _: None)
        watched.step()
    watched.progress.add_reset()
    watched.open()
    assert watched.get("siltstone_resets_total") == 1
    assert watched.get("siltstone_checkpoints_total") == watched.get("siltstone_checkpoint_id") == 2
    assert watched.get("siltstone_uncommitted_steps") == 0
    assert watched.get("siltstone_checkpoint_bytes") == watched.place.catalog.checkpoints.get_latest(NAME).bytes
    assert watched.get("siltstone_checkpoint_seconds") is None, "nobody knows"
    watched.step()
    assert watched.get("siltstone_steps_total") == watched.get("siltstone_placement_moves_total") == 5
    assert watched.get("siltstone_uncommitted_steps") == 1


def test_restores_are_counted_with_their_bytes(watched: Watched) -> None:
    for _ in range(2):
        watched.step()
    local = watched.place.warehouse.local
    for work in local.work(NAME, 1).parent.glob("*"):
        work.rename(work.with_name(f"lost-{work.name}"))
    watched.open()
    watched.step()
    assert watched.get("siltstone_restores_total", operator="tiny") == MAX_PARALLELISM
    restored = watched.get("siltstone_restored_bytes_total", operator="tiny")
    assert restored is not None and restored > 0


def test_what_a_source_reports_is_shown_with_the_number_of_the_source(watched: Watched) -> None:
    told = {("", "inputRowsPerSecond"): 12.5, ("0", "maxOffsetsBehindLatest"): 41.0}
    watched.progress.refresh_query(lambda: told)
    assert watched.get("siltstone_query_input_rows_per_second") is None, "nobody watches, so Spark is not asked"
    watched.progress.is_watched = True
    watched.progress.refresh_query(lambda: told)
    assert watched.get("siltstone_query_input_rows_per_second") == 12.5
    assert watched.get("siltstone_source_reported", source="0", name="maxOffsetsBehindLatest") == 41
    watched.progress.add_reset()
    assert watched.get("siltstone_source_reported", source="0", name="maxOffsetsBehindLatest") is None


@pytest.mark.server
def test_metrics_are_served_until_the_run_ends() -> None:
    metrics = RunMetrics(Settings(metrics_port="0"), NAME)
    url = metrics.serve()
    assert url is not None and url.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(url) as answer:
        text = io.TextIOWrapper(answer).read()
    assert f'siltstone_steps_total{{stream="{NAME}"}} 0.0\n' in text
    assert f'siltstone_upload_hedges_sent_total{{stream="{NAME}"}} 0.0\n' in text
    assert "python_info" not in text, "nothing of the global registry"
    metrics.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url)


@pytest.mark.server
def test_a_port_in_use_is_one_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1 port {port}: .*in use; end what listens") as refused:
            RunMetrics(Settings(metrics_port=str(port)), NAME).serve()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "address"),
    [
        (9464, ("127.0.0.1", 9464)),
        ("9464", ("127.0.0.1", 9464)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("[::1]:9464", ("::1", 9464)),
        ("driver:0", ("driver", 0)),
    ],
)
def test_an_address_is_a_port_or_a_host_with_one(given: object, address: tuple[str, int]) -> None:
    port = load_settings(metrics_port=given).metrics_port
    assert port is not None and parse_address(port) == address


@pytest.mark.parametrize("given", ["", "http", ":9464", "9464:", "65536", "-1", "::1:9464", "[]:1", "True"])
def test_other_addresses_are_refused(given: str) -> None:
    with pytest.raises(UsageError, match=r"option metrics_port: .* is not an address: write PORT or HOST:PORT"):
        load_settings(metrics_port=given)
