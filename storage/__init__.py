"""Jobs, trials, attempts and events in SQL: the only truth about what was tried and what came of it."""
