"""User modules: loading them and dividing them."""
