"""A rank's files, read ahead and written behind its computation."""
