"""Explains the results of a job: findings and figures."""
