"""Trials on Ray: one actor per rank, each with a rank process as its child."""

from executor.runners.ray.runner import RayRunner

__all__ = ["RayRunner"]
