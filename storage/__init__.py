"""Jobs, trials, attempts and events in SQL: the single source of truth about trials and their results."""
