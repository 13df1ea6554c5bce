"""The gateway over MCP: its tools, results and files, in both protocol eras, over HTTP and stdio.

The SDK costs 0.8 s to import, so nothing here is imported before somebody speaks MCP.
"""
