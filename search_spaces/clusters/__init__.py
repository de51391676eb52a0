"""Clusters: nodes, devices and links; presets; micro-benchmark requests and results."""
