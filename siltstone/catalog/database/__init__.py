"""The database underneath the catalog: its tables and their migrations, its engine, and its transactions."""
