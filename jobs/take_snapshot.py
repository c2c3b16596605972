"""Write the live state of the newest checkpoint in full, for verify_checkpoints.py --deep to compare with.

`spark-submit jobs/take_snapshot.py STREAM [options]` is `siltstone snapshot STREAM --json`.
"""

from siltstone.cli import run_job

if __name__ == "__main__":
    run_job("snapshot")
