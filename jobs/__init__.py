"""What a cluster is asked to do, one file a job: `spark-submit jobs/run_stream.py STREAM`, `python -m jobs.run_stream`.

Each file has one function, which the assets call too, and a command line around it. Importing a job starts nothing
and imports no pyspark. `spark-submit` wants this directory's parent on PYTHONPATH, unless Siltstone is installed from
it as editable.
"""
