"""The vocabulary of the product: model, cluster, knobs, rules, the space; trial, result, outcome.

Imports the standard library alone, and RE2 where it is there, so that it can be read anywhere a rank runs.
"""
