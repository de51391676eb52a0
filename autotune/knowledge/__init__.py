"""Knowledge: measurements of other jobs, tables and organisations, as signed bundles; how far they are believed."""
