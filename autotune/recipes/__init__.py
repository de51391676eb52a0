"""A recipe on another cluster or against its rivals: candidates by prediction, and the recipe written anew."""
