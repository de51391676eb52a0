"""The vocabulary of the product: model, cluster, knobs, rules, the space; trial, result, outcome.

Imports the standard library alone, so that it can be read anywhere a rank runs.
"""
