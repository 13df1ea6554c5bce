"""The official MCP conformance suite, run through the gateway in front of a server of ours."""
