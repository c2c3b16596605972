"""Signals to real processes in the middle of a step: a run ends behind it, with a checkpoint, recorded as stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pyspark
import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from tests.system.lingering_stream import BATCHES, LINGER

ROOT = Path(__file__).parents[2]
STREAM = "lingering"
RUN = (sys.executable, "-m", "siltstone.cli", "run", STREAM, "--json")
FOLLOW = (*RUN, "--follow")
SPARK_SUBMIT = (str(Path(pyspark.__path__[0]) / "bin" / "spark-submit"), "--master", "local[2]")
SUBMIT = (*SPARK_SUBMIT, str(ROOT / "jobs" / "run_stream.py"), STREAM)
OWN_QUERY = (sys.executable, "-c", "from tests.system.test_stopping import own_query; own_query()")
CONFIGURATION = 'streams = ["tests.system.lingering_stream"]\nwarehouse = "w"\nparallelism = 2\nmaster = "local[2]"\n'


def own_query() -> None:
    """What a user's program does that wants to end as `siltstone run` does."""
    from siltstone.settings import load_settings
    from siltstone.spark.operations import stop_on_signals, stream_runner
    from siltstone.spark.session import spark_session
    from siltstone.spark.sources import open_input
    from tests.system.lingering_stream import LINGERING

    settings = load_settings()
    spark = spark_session(settings.master, steps=True)
    with stream_runner(settings, LINGERING, spark) as runner, stop_on_signals(spark) as stop:
        rows = open_input(spark, LINGERING, runner.region.warehouse, {}).rows
        runner.follow_log(rows, stop.is_set)
        writer = rows.writeStream.foreachBatch(runner).option("checkpointLocation", runner.checkpoint_location)
        runner.await_query(writer.start(), stop)
    print(json.dumps({"stopped": runner.stopped}))


def family(pid: int) -> set[int]:
    """A process and all it has started, the JVM and Python's workers among them."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found, new = {pid}, {pid}
    while new := {child for child, parent in parents.items() if parent in new}:
        found |= new
    return found


def command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def is_over(pid: int) -> bool:
    """Whether a process is gone, or nobody has asked yet how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def until(what: Callable[[], bool]) -> None:
    while not what():
        time.sleep(0.05)


@contextmanager
def in_its_second_step(project: Path, command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A process of the command, once a task of the second step waits."""
    (project / "siltstone.toml").write_text(CONFIGURATION)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), LINGER: str(project), "PYSPARK_PYTHON": sys.executable}
    with subprocess.Popen(
        command, cwd=project, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            until(lambda: (project / "begun").exists() or process.poll() is not None)
            assert process.poll() is None, process.communicate()
            yield process
        finally:
            for pid in family(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def recorded(project: Path) -> tuple[int, str | None, int]:
    """The newest checkpoint, how the newest run ended, and how many leases are left."""
    with OpenWarehouse.open_existing(str(project / "w")) as place:
        catalog = place.catalog
        return (
            catalog.checkpoints.last_id(STREAM),
            catalog.runs.list(STREAM)[-1].outcome,
            len(catalog.leases.list_live(STREAM)),
        )


def ended(project: Path, process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Let the step go on; exit code, output and errors."""
    (project / "go").touch()
    out, err = process.communicate()
    return process.returncode, out, err


def check_stopped_behind_the_step(project: Path) -> None:
    newest, outcome, leases = recorded(project)
    assert 2 <= newest < BATCHES and (outcome, leases) == ("stopped", 0)


@pytest.mark.smoke
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)])
def test_a_run_of_what_is_available_says_that_it_was_stopped_before_its_end(
    tmp_path: Path, number: signal.Signals
) -> None:
    with in_its_second_step(tmp_path, RUN) as process:
        process.send_signal(number)
        code, out, err = ended(tmp_path, process)
    assert (code, out) == (128 + number, "")
    [line] = [line for line in err.splitlines() if "incubator" not in line]
    assert line.startswith(f"siltstone: {STREAM} was stopped by {number.name}, and checkpoint ")
    check_stopped_behind_the_step(tmp_path)


def test_a_signal_to_every_process_at_once_leaves_the_jvm_and_its_workers_until_the_checkpoint(tmp_path: Path) -> None:
    """As systemd does it; a terminal's Ctrl-C reaches the group only (`test_cli`)."""
    with in_its_second_step(tmp_path, FOLLOW) as process:
        members = family(process.pid)
        commands = [command_of(pid) for pid in members]
        assert any("java" in command for command in commands)
        assert sum("siltstone.spark.daemon" in command for command in commands) > 1, "the daemon, and its worker"
        for pid in members:
            with suppress(ProcessLookupError):  # some live for a moment only
                os.kill(pid, signal.SIGTERM)
        code, out, err = ended(tmp_path, process)
        assert code == 0, err
        result = json.loads(out)
        assert result["stopped"] == "SIGTERM" and result["checkpoints"][:2] == [1, 2]
        assert result["rows"] == len(result["checkpoints"]), "of one row each"
        until(lambda: all(is_over(pid) for pid in members))
    check_stopped_behind_the_step(tmp_path)


def test_under_spark_submit_the_jvm_passes_the_signal_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SILTSTONE_MASTER", "local[nonsense]")  # spark-submit decides where Spark runs
    with in_its_second_step(tmp_path, SUBMIT) as process:
        assert "java" in command_of(process.pid)
        process.send_signal(signal.SIGTERM)
        code, out, err = ended(tmp_path, process)
    assert code == 128 + signal.SIGTERM, err
    assert f"siltstone: {STREAM} was stopped by SIGTERM" in out, "spark-submit makes one of the two outputs"
    check_stopped_behind_the_step(tmp_path)


def test_a_query_of_the_users_own_stops_where_its_program_asks_for_it(tmp_path: Path) -> None:
    with in_its_second_step(tmp_path, OWN_QUERY) as process:
        process.send_signal(signal.SIGTERM)
        code, out, err = ended(tmp_path, process)
    assert code == 0, err
    assert json.loads(out) == {"stopped": "SIGTERM"}
    check_stopped_behind_the_step(tmp_path)


def test_a_second_signal_ends_the_process(tmp_path: Path) -> None:
    with in_its_second_step(tmp_path, FOLLOW) as process:
        members = family(process.pid)
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        assert process.returncode == -signal.SIGTERM
        (tmp_path / "go").touch()
        until(lambda: all(is_over(pid) for pid in members))
    newest, outcome, _ = recorded(tmp_path)
    assert (newest, outcome) == (1, None)


def test_a_driver_that_is_killed_leaves_no_jvm_and_no_worker(tmp_path: Path) -> None:
    with in_its_second_step(tmp_path, FOLLOW) as process:
        members = family(process.pid)
        process.kill()
        process.wait()
        until(lambda: all(is_over(pid) for pid in members if "python" not in command_of(pid)))
        (tmp_path / "go").touch()  # a worker in the middle of a task notices at its end, as ever
        until(lambda: all(is_over(pid) for pid in members))


def test_the_daemon_of_workers_imports_nothing_that_starts_threads() -> None:
    """It forks; a thread of its parent would be missing in each worker. PySpark before 4.2 imports NumPy itself."""
    code = (
        "import os, sys, pyspark.daemon\n"
        "threads, modules = len(os.listdir('/proc/self/task')), set(sys.modules)\n"
        "import siltstone.spark.daemon\n"
        "assert len(os.listdir('/proc/self/task')) == threads\n"
        "assert not {'pyarrow', 'numpy', 'pandas'} & (set(sys.modules) - modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
