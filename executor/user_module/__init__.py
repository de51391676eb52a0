"""A module of the user's own: how it is loaded, and how it may be divided."""
