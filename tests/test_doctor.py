"""`forge-hf doctor`."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from forge_hf.cli import app
from forge_hf.hf import doctor
from forge_hf.hf.doctor import Finding, examine


@pytest.fixture
def quick(monkeypatch):
    """Without the fresh Python."""
    monkeypatch.setattr(doctor, "_autoload", lambda: Finding("autoload", "as tested elsewhere", True))


def test_a_sound_installation(quick):
    findings = {finding.what: finding for finding in examine()}
    assert findings["torch"].value == torch.__version__
    assert findings["self-test"].ok and "agrees with torch.optim.AdamW" in findings["self-test"].value
    assert not any(finding.ok is False for finding in findings.values())
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 0 and "self-test" in result.output


def test_a_wrong_update_is_a_fault(quick, monkeypatch):
    from forge_hf import reference

    def twice(w, g, moments, s, rule=reference._ARITHMETIC["adamw"]):
        rule(w, 2 * g, moments, s)
        w.add_(1e-3)

    monkeypatch.setitem(reference._ARITHMETIC, "adamw", twice)
    finding = next(each for each in examine() if each.what == "self-test")
    assert finding.ok is False and "DISAGREES WITH" in finding.value
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 1 and "FAULT" in result.output


def test_autoload_in_a_fresh_python(monkeypatch):
    found = doctor._autoload()
    assert found.value.startswith("active") if found.ok else "Fix:" in found.value
    monkeypatch.setenv("FORGE_HF_AUTOLOAD", "0")
    off = doctor._autoload()
    assert off.ok is None and "FORGE_HF_AUTOLOAD=0" in off.value


def test_what_is_not_installed_is_told(monkeypatch):
    assert doctor._version("forge-hf-of-another-world") == "not installed"
    monkeypatch.setenv("FORGE_HF_BACKEND", "reference")
    assert doctor._backend("cpu") == "reference (plain torch; FORGE_HF_BACKEND=reference)"
