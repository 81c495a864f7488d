from __future__ import annotations

from pathlib import Path

import pytest

from cog_triton.weights import fetch
from tests.unit.weights.support import Site


@pytest.mark.parametrize("progress", [True, False])
def test_the_progress_bar(
    progress: bool, site: Site, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    site.serve(drops=[100_000])
    fetch(f"{site.url}/m.tar", cache=cache, progress=progress)
    bar = capfd.readouterr().err
    if progress:
        assert "Downloading m.tar" in bar
        assert "522k/522k" in bar
        assert "B/s" in bar
    else:
        assert bar == ""
