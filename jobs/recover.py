"""Go back to the newest checkpoint of a damaged stream that restores.

`spark-submit jobs/recover.py STREAM [options]` is `siltstone recover STREAM --json`.
"""

from siltstone.cli import run_job

if __name__ == "__main__":
    run_job("recover")
