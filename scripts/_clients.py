"""The table of clients in docs/openai/agents.md, from docs/clients.yaml."""

from __future__ import annotations

import yaml
from _checkout import ROOT

READ = "read"
DOES_NOT_APPLY = "-"
NOT_TRIED = "not tried"
SHOWN = {READ: READ, DOES_NOT_APPLY: "–", NOT_TRIED: NOT_TRIED}
FILE = ROOT / "docs" / "clients.yaml"
COLUMNS = ("starts", "streams", "tools", "second turn", "images refused clearly", "cancel")
HEADER = ("Client", *COLUMNS)


def load() -> dict[str, dict[str, str]]:
    """Return what shows each column of each client: the id of a test, or a key of SHOWN."""
    clients: dict[str, dict[str, str]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return clients


def table_rows() -> list[list[str]]:
    rows = []
    for client, evidence in load().items():
        cells = [SHOWN.get(evidence[column], "tested") for column in COLUMNS]
        rows.append([client, *cells])
    return rows
