"""Base or delta, what bounds a restore, when a chain is materialized, and materialization itself."""
