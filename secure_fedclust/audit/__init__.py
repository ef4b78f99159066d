"""Attacks on what is released, empirical lower bounds, and the report."""
