"""Reads configurations of other frameworks as knobs."""
