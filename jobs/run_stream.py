"""Process what a stream's source has, from the newest completed checkpoint on.

`spark-submit jobs/run_stream.py STREAM [options]` is `siltstone run STREAM --json`.
"""

from siltstone.cli import run_job

if __name__ == "__main__":
    run_job("run")
