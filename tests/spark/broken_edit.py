"""A module that cannot be imported, named by a test of `siltstone edit --function`."""

halve = 1 / 0
