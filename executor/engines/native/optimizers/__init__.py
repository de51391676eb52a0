"""Optimizers other than AdamW, over a rank's flat master vector."""
