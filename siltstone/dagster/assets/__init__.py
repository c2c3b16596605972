"""What streams lay down, as Dagster assets: a factory an asset, called once a registered stream."""
