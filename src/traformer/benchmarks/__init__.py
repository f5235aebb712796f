"""Measurements of speed and memory, run by `tra bench`."""
