"""The HTTP transport: `/v1`, with problem details for what never became a call."""
