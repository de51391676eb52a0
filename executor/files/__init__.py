"""Files of a rank: read ahead and written behind its work."""
