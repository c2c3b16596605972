"""The jobs of a Spark cluster, one file each: `spark-submit jobs/run_stream.py STREAM [options]`.

Each job is a command of `siltstone` with `--json`. Unless Siltstone is installed, `spark-submit` needs the directory
above on PYTHONPATH.
"""
