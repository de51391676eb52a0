"""Callbacks with which training frameworks report to autotune. Each module imports its framework and `autotune.measured`."""
