"""Process the input that a stream's source has, starting after the newest completed checkpoint.

`spark-submit jobs/run_stream.py STREAM [options]` is `siltstone run STREAM --json`.
"""

from siltstone.cli import run_job

if __name__ == "__main__":
    run_job("run")
