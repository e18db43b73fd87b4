"""The pages of docs/: their Python blocks run, the navigation has them, options and names are all there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import forge_hf
from forge_hf.config import ForgeConfig
from forge_hf.hf.registration import FORGE_OPTIMIZERS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{index}")
    for page in [*PAGES, ROOT / "README.md"]
    for index, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = block.replace("(..., ", '("out", ')
    if "TrainingArguments(" in code and "import TrainingArguments" not in code:
        code = "from transformers import TrainingArguments\n" + code
    exec(compile(code, "docs", "exec"), {})


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    named = set(re.findall(r"([a-z_]+\.md)", text))
    assert named == {page.name for page in PAGES}


def test_every_option_and_name_is_in_the_readme():
    readme = (ROOT / "README.md").read_text("utf-8")
    for option in ForgeConfig.__dataclass_fields__:
        assert f"`{option}`" in readme or f"{option}=" in readme, option
    api = (ROOT / "docs" / "api.md").read_text("utf-8")
    for name in FORGE_OPTIMIZERS:
        assert f"`{name}`" in api, name
    for name in forge_hf.__all__:
        assert re.search(rf"\.{name}$", api, re.M), name


def test_links_between_pages_lead_somewhere():
    """Also those that mkdocs does not see: of the README, and to folders."""
    for page in [*PAGES, ROOT / "README.md", ROOT / "examples" / "README.md"]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"
