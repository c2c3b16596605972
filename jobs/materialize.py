"""Consolidate a stream's chains into new bases.

`spark-submit jobs/materialize.py STREAM [options]` is `siltstone materialize STREAM --json`.
"""

from siltstone.cli import run_job

if __name__ == "__main__":
    run_job("materialize")
