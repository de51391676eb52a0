"""Reports of a job: one self-contained HTML file, or Markdown."""
