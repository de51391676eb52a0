"""Questions whose trials differ in size, as series of jobs."""
