"""Checks a configuration of another framework: legality, effect, memory and speed, with the smallest change that helps."""
