"""Coefficients and residuals, fitted to measurements."""
