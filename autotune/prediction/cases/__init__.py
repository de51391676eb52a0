"""Builders of the arrays that the equations read: from configurations, from a space, from a micro-benchmark."""
