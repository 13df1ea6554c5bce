"""Hooks of other frameworks, run here unchanged; each module is imported only by who names it."""
