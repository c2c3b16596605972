"""Chains: base or delta, bounds on restores, when to materialize, and materialization itself."""
