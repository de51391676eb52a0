"""Configurations that people have in other frameworks, as knobs."""
