"""Agreement of predictions with tables of measurements."""
