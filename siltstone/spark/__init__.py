"""Run streams on Spark: session, stream runner, tasks, data source. Only this package imports pyspark."""
