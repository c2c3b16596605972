"""One numbered file per revision; a released revision is never changed."""
