"""One trial on one rank."""
