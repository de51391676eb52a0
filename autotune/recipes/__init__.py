"""A recipe under predictions: findings, other clusters and rivals, and the recipe written anew."""
