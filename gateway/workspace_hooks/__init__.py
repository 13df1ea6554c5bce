"""The ready SandboxHooks: they speak to a sandbox and to the outside."""
