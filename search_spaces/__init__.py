"""The vocabulary of the product: model, cluster, knobs, rules, the space; trial, result, outcome.

Imports only the standard library, and RE2 where it is installed, so that it can be imported wherever a rank runs.
"""
