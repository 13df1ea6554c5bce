"""Transports: bytes in, tool calls out."""
