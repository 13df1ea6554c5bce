"""`sandgate mcp-config`: what an MCP client must be told, ready to be put into its file."""

import json
import shutil
import sys
from typing import Annotated, Any, Final, Literal

from cyclopts import Parameter

from gateway.client import endpoint

ClientName = Literal["claude", "cursor", "vscode"]
FILES: Final = {"claude": ".mcp.json", "cursor": ".cursor/mcp.json", "vscode": ".vscode/mcp.json"}
TIMEOUT_MS: Final = 600_000
"""Claude Code's hard limit of one call; ours is at most 600 s."""


def mcp_config_command(
    client: Annotated[ClientName, Parameter(help="Whose configuration.")],
    /,
    *,
    stdio: Annotated[
        bool, Parameter(name="--stdio", negative="", help="A command that needs no running gateway and no token.")
    ] = False,
) -> None:
    """Print the configuration with which Claude Code, Cursor or VS Code uses the gateway at SANDGATE_URL.

    It holds no token: it names where the client finds the agent's one.
    """
    print(json.dumps(configuration(client, endpoint().url, stdio=stdio), indent=2))
    print(f"note: this belongs into {FILES[client]} of your project", file=sys.stderr)
    if not stdio and client != "vscode":
        print("note: start the client with SANDGATE_TOKEN=$(sandgate token agent)", file=sys.stderr)


def configuration(client: ClientName, url: str, *, stdio: bool) -> dict[str, Any]:
    if stdio:
        return _in(client, {"type": "stdio", "command": shutil.which("sandgate") or "sandgate", "args": ["mcp"]})
    token = {"claude": "${SANDGATE_TOKEN}", "cursor": "${env:SANDGATE_TOKEN}", "vscode": "${input:sandgate-token}"}
    server: dict[str, Any] = {
        "type": "http",
        "url": f"{url}/mcp",
        "headers": {"Authorization": f"Bearer {token[client]}"},
    }
    if client == "claude":
        server["timeout"] = TIMEOUT_MS
    return _in(client, server)


def _in(client: ClientName, server: dict[str, Any]) -> dict[str, Any]:
    if client != "vscode":
        return {"mcpServers": {"sandgate": server}}
    asked = {
        "type": "promptString",
        "id": "sandgate-token",
        "description": "What `sandgate token agent` prints",
        "password": True,
    }
    return {"servers": {"sandgate": server}, **({"inputs": [asked]} if server["type"] == "http" else {})}
