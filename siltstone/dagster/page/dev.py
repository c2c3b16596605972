"""Run `dagster dev` with the guarded web server (`page.webserver`); `siltstone ui` executes this.

python -m siltstone.dagster.page.dev -w workspace.yaml -p PORT
"""

import sys
from typing import Any

from dagster._cli import dev

GUARDED = "siltstone.dagster.page.webserver"
NOBODY = "guarded.invalid"
"""not an address: if Dagster's own web server is started by mistake, it cannot listen there"""
_start = dev.open_ipc_subprocess


def start(parts: list[str], **options: Any) -> Any:
    """Start a process as Dagster does, but the guarded web server instead of Dagster's own."""
    return _start([GUARDED if part == "dagster_webserver" else part for part in parts], **options)


if __name__ == "__main__":
    dev.open_ipc_subprocess = start
    dev.dev_command([*sys.argv[1:], "-h", NOBODY])
