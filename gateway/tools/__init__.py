"""Tools: what an agent may call."""
