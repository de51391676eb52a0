"""How the proofs are run on a machine with a GPU: a section of their page."""

MANUAL = """
## Run it on a GPU

(to be written)
"""
