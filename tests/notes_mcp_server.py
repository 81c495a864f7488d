"""An MCP server on standard input and output, with one tool that reads a note."""

import json
import sys
from typing import Any

TOOL = {
    "name": "read_note",
    "description": "Reads a note.",
    "inputSchema": {
        "type": "object",
        "properties": {"name": {"type": "string"}},
        "required": ["name"],
    },
}


def result(method: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a request."""
    if method == "initialize":
        return {
            "protocolVersion": parameters["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "notes", "version": "1.0.0"},
        }
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        text = f"The note {parameters['arguments']['name']} is empty."
        return {"content": [{"type": "text", "text": text}]}
    return {}


if __name__ == "__main__":
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:  # a notification has none, and gets no answer
            answer = result(message["method"], message.get("params", {}))
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": answer}), flush=True)
