"""The published procedures of other tuners, as strategies."""
