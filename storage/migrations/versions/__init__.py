"""One module a revision, in order. A revision that was released is never changed."""
