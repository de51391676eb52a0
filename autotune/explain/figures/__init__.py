"""The figures of a job as plain data, which pages, notebooks and reports draw each in their own way."""
