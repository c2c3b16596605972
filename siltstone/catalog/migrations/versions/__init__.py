"""One file a revision, numbered; a revision that was released is never changed."""
