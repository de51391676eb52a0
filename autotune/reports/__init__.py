"""A job as something to show: one HTML file that needs nothing else, or Markdown."""
