"""Make a stream ready again after something of it was damaged.

`spark-submit jobs/recover.py STREAM [options]` is `siltstone recover STREAM --json`.
"""

from siltstone.cli import run_job

if __name__ == "__main__":
    run_job("recover")
