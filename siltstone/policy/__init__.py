"""Pure decisions: base or delta, how to restore, what a bound allows."""
