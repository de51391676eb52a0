"""Callbacks by which training frameworks report to autotune. Each module imports its framework, and nothing else of ours."""
