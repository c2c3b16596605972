"""The guarded web server of `siltstone ui`, and the launcher of its runs."""
