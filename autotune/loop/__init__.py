"""The tuning loop: recall, propose, check, run, record."""
