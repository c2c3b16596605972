"""The only importer of pyspark: session, stream runner, tasks, data source."""
