"""Peers measured beside ours: `run.py` is imported, every other file is a script for an environment of its own."""
