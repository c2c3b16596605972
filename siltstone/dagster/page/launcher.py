"""Launches runs as Dagster does by itself, and says of each whether the code server that runs it is still there.

A code server fails a run whose process dies at once. Nobody does so when the server dies too, as when the machine goes
down, or `siltstone ui` is killed: the run would count as started for ever, and keep its place in its pool.
"""

import json
import socket

import dagster as dg
from dagster._core.launcher import CheckRunHealthResult, WorkerStatus
from dagster._core.storage.tags import GRPC_INFO_TAG

TIMEOUT_S = 5.0


class CodeServerRunLauncher(dg.DefaultRunLauncher):
    """Dagster's own launcher, for whose runs its run monitoring can tell that their code server is gone."""

    @property
    def supports_check_run_worker_health(self) -> bool:
        """Dagster asks only launchers that say so."""
        return True

    def check_run_worker_health(self, run: dg.DagsterRun) -> CheckRunHealthResult:
        """Failed if nobody listens where the run's code server did; a server that is only slow is there."""
        where = json.loads(run.tags.get(GRPC_INFO_TAG, "{}"))
        try:
            if "socket" in where:
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.settimeout(TIMEOUT_S)
                    probe.connect(where["socket"])
            elif "port" in where:
                socket.create_connection((where["host"], where["port"]), TIMEOUT_S).close()
        except (ConnectionRefusedError, FileNotFoundError) as error:
            return CheckRunHealthResult(WorkerStatus.FAILED, f"its code server is gone: {error.strerror}")
        except OSError as error:
            return CheckRunHealthResult(WorkerStatus.RUNNING, f"its code server is slow to answer: {error}")
        return CheckRunHealthResult(WorkerStatus.RUNNING)
