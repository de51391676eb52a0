"""Printed output: tables, lines and numbers, for the command line, notebooks and reports."""
