"""A process ends well while a thread of it is in a call of delta-rs."""

import subprocess
import sys
from pathlib import Path

ENDS_IN_A_CALL = """
import sys, threading
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from siltstone.sinks.delta_calls import delta_call

path, schema, begun = sys.argv[1], pa.schema([("n", pa.int64())]), threading.Event()
DeltaTable.create(path, schema)

def commit_on_and_on():
    for n in range(1, 10**9):
        with delta_call("the table"):
            properties = CommitProperties(app_transactions=[Transaction("siltstone", n)])
            DeltaTable(path).create_write_transaction([], "append", schema, commit_properties=properties)
        if n == 5:
            begun.set()

threading.Thread(target=commit_on_and_on, daemon=True).start()
assert begun.wait(60)
"""


def test_a_process_that_ends_while_its_daemon_thread_commits_ends_well(tmp_path: Path) -> None:
    """Seen: a process with deltalake was killed by a signal at its exit. Without the wait it was, in 6 of 6 trials."""
    command = [sys.executable, "-c", ENDS_IN_A_CALL, str(tmp_path / "t")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
