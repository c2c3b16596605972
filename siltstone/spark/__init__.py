"""Run streams on Spark: session, stream runner, tasks, data source. Only this package imports pyspark."""

from siltstone.extras import check_extra

check_extra("spark", "pyspark", "Spark")
