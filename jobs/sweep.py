"""Delete stored objects that nothing refers to.

`spark-submit jobs/sweep.py STREAM [options]` is `siltstone sweep STREAM --json`.
"""

from siltstone.cli import run_job

if __name__ == "__main__":
    run_job("sweep")
