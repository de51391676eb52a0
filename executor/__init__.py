"""Runs trials: the native engine and the other engines, the runners of rank processes, and the measurement.

All modules except the Ray runner import only the standard library and torch. Importing `executor` itself imports neither torch
nor ray.
"""
