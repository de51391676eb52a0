"""How well predictions agree with tables of measurements."""
