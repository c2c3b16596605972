"""Launch runs as Dagster does, and check whether the code server of a run still exists.

A code server marks a run as failed when its process dies. If the server dies too, as when the machine goes down or
`siltstone ui` is killed, nothing does: the run would count as started forever and block its pool.
"""

import json
import socket

import dagster as dg
from dagster._core.launcher import CheckRunHealthResult, WorkerStatus
from dagster._core.storage.tags import GRPC_INFO_TAG

TIMEOUT_S = 5.0


class CodeServerRunLauncher(dg.DefaultRunLauncher):
    """Dagster's default launcher, with a health check by which run monitoring detects that a code server has ended."""

    @property
    def supports_check_run_worker_health(self) -> bool:
        """True, so that Dagster calls `check_run_worker_health`."""
        return True

    def check_run_worker_health(self, run: dg.DagsterRun) -> CheckRunHealthResult:
        """Report FAILED if nothing listens at the address of the run's code server; a slow server counts as running."""
        where = json.loads(run.tags.get(GRPC_INFO_TAG, "{}"))
        try:
            if "socket" in where:
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.settimeout(TIMEOUT_S)
                    probe.connect(where["socket"])
            elif "port" in where:
                socket.create_connection((where["host"], where["port"]), TIMEOUT_S).close()
        except (ConnectionRefusedError, FileNotFoundError) as error:
            return CheckRunHealthResult(WorkerStatus.FAILED, f"its code server has ended: {error.strerror}")
        except OSError as error:
            return CheckRunHealthResult(WorkerStatus.RUNNING, f"its code server is slow to answer: {error}")
        return CheckRunHealthResult(WorkerStatus.RUNNING)
