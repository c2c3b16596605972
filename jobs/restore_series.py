"""Restore many checkpoints, each as Parquet under a label.

`spark-submit jobs/restore_series.py STREAM [options]` is `siltstone restore-series STREAM --json`.
"""

from siltstone.cli import run_job

if __name__ == "__main__":
    run_job("restore-series")
