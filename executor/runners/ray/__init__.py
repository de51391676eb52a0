"""Trials on Ray: one actor a rank, each with a rank process of ours as its child."""

from executor.runners.ray.runner import RayRunner

__all__ = ["RayRunner"]
