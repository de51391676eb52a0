"""Clusters: nodes, devices and links; presets; what a micro-benchmark measures."""
