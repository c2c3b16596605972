"""What a cluster is asked to do: `spark-submit jobs/run_stream.py STREAM [options]`, one file per job.

Each job is a command of `siltstone` with `--json`. `spark-submit` needs the directory above on PYTHONPATH, unless
Siltstone is installed.
"""
