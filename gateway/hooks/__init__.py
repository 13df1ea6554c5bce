"""Hooks: what stands before and after a tool."""
