"""Series of jobs that compare different sizes: numbers of ranks or sequence lengths."""
