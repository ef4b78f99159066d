"""Attacks on what is released, lower bounds from them, and checks of how it is released."""
