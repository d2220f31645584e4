from __future__ import annotations

import pytest

from interclr.screen import duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (89, "89 s"), (90, "2 min"), (5_399, "90 min"), (5_400, "1.5 h"), (200_000, "2.3 days")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text
