"""`dagster dev` with a web server that is guarded (`page.webserver`); `siltstone ui` becomes this.

python -m siltstone.dagster.page.dev -w workspace.yaml -p PORT
"""

import sys
from typing import Any

from dagster._cli import dev

GUARDED = "siltstone.dagster.page.webserver"
NOBODY = "guarded.invalid"
"""no address: Dagster's own web server, should it be started after all, cannot listen there"""
_start = dev.open_ipc_subprocess


def start(parts: list[str], **options: Any) -> Any:
    """Start a process as Dagster does, but for its web server the guarded one."""
    return _start([GUARDED if part == "dagster_webserver" else part for part in parts], **options)


if __name__ == "__main__":
    dev.open_ipc_subprocess = start
    dev.dev_command([*sys.argv[1:], "-h", NOBODY])
