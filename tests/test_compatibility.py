"""docs/compatibility.md has a row for each test that writes one, and no other."""

from __future__ import annotations

import pytest

from tests import compatibility
from tests.compatibility import PAGE, page, row_of, rows_of_page


def test_the_page_and_the_tests_have_the_same_rows(request):
    """Of the test files that were collected: those rows, no other, and each once."""
    rows: dict[compatibility.Row, str] = {}
    for item in request.session.items:
        row = row_of(item)
        if row is not None:
            file = item.nodeid.partition("::")[0]
            assert row not in rows, f"two tests write {row}"
            rows[row] = file
    written = rows_of_page(PAGE.read_text(encoding="utf-8"))
    assert len(written) > 100
    files = {item.nodeid.partition("::")[0] for item in request.session.items}
    if not rows:
        pytest.skip("only this file was collected")
    selected = bool(request.config.getoption("-k") or request.config.getoption("-m"))
    if selected or any("::" in argument for argument in request.config.args):
        assert rows.items() <= written.items()
    else:
        assert rows == {row: file for row, file in written.items() if file in files}


def test_a_page_reads_back(monkeypatch):
    monkeypatch.setattr(compatibility, "_distances", [3e-7, 2e-4])
    rows = {
        ("A", "one \\| two", "step"): (compatibility.result([]), "tests/test_a.py"),
    }
    monkeypatch.setattr(compatibility, "_distances", [])
    rows["B", "three", ""] = (compatibility.result(["No | way. Fix: that."]), "tests/test_b.py")
    text = page(rows)
    assert "| one \\| two | step | below 0.1 % | `tests/test_a.py` |" in text
    assert "| three |  | refused: No \\| way. Fix: that. | `tests/test_b.py` |" in text
    assert rows_of_page(text) == {row: file for row, (_, file) in rows.items()}


@pytest.mark.parametrize("distances, text", [
    ([], "the same"), ([0.0], "equal to the bit"), ([1e-3], "below 0.1 %"), ([0.02], "below 10 %"),
    ([3e-7], "below 0.0001 %"),
])  # fmt: skip
def test_results(monkeypatch, distances, text):
    monkeypatch.setattr(compatibility, "_distances", distances)
    assert compatibility.result([]) == text
