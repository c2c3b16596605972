"""Delete the checkpoints that retention does not keep.

`spark-submit jobs/truncate.py STREAM [options]` is `siltstone truncate STREAM --json`.
"""

from siltstone.cli import run_job

if __name__ == "__main__":
    run_job("truncate")
