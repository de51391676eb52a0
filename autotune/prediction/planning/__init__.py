"""Plans: the configurations of a space that are predicted to be best, and what fits."""
