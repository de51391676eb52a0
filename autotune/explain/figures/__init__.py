"""What each figure of a job shows, as plain data: pages, notebooks and reports draw it each in their own way."""
