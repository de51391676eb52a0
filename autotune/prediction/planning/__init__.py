"""Plans: the configurations of a space with the best predictions, and what fits."""
