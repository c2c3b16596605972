"""A stream with a Delta sink whose process is killed at any moment, again and again: each row is in the table once."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from siltstone.sinks.maintenance import optimize_sinks
from tests.delta_run import TableRun, rows_in, sink_table
from tests.outbox_run import NAME, batch, inputs, outstanding
from tests.places import place_at

KILLS = 12
WRITER = """
import sys
from pathlib import Path
from siltstone.sinks.maintenance import optimize_sinks
from tests.delta_run import TableRun
from tests.outbox_run import NAME, batch
from tests.places import place_at

place = place_at(Path(sys.argv[1]))
run = TableRun(place)
while True:
    n = run.region.completed + 1
    run.step(batch(n))
    print(n, flush=True)
    if n % 5 == 0:
        optimize_sinks(place, NAME)
"""


def test_rows_are_in_the_table_once_however_often_the_writer_is_killed(tmp_path: Path) -> None:
    draw = random.Random(13)
    for _ in range(KILLS):
        command = [sys.executable, "-c", WRITER, str(tmp_path / "w")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None and writer.stderr is not None
            assert writer.stdout.readline(), writer.stderr.read()  # it has come to a checkpoint of its own
            time.sleep(draw.uniform(0, 0.3))
            writer.send_signal(signal.SIGKILL)
    with place_at(tmp_path / "w") as place:
        done = place.catalog.checkpoints.last_id(NAME)
        last = TableRun(place)
        assert outstanding(place) == [] and sink_table(place).find_delivered() == done >= KILLS
        assert rows_in(place) == inputs(range(1, done + 1))
        last.step(batch(done + 1))
        optimize_sinks(place, NAME)
        assert rows_in(place) == inputs(range(1, done + 2))
