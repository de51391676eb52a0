"""A plug-in of every kind, as a distribution of its own would have them."""
