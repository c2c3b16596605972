"""Prove that every retained checkpoint restores to the state that the stream had.

`spark-submit jobs/verify_checkpoints.py STREAM [options]` is `siltstone verify STREAM --all --json`.
"""

from siltstone.cli import run_job

if __name__ == "__main__":
    run_job("verify", "--all")
