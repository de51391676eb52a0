"""Stands in for transformer_engine where no GPU is: pure torch, with the signatures of 2.8."""
