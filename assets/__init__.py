"""What streams leave behind, as Dagster assets: one file for each kind."""
