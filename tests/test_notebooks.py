"""Every notebook runs from top to bottom on a CPU, and is stored without outputs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
#: A line that each prints, from its last cells.
SAYS = {
    "01_quickstart": "held at most",
    "02_where_the_memory_goes": "forge, update=backward   held after backward",
    "03_galore_subspaces": "% of what the exact SVD's holds",
    "04_lora_and_forge": "largest difference of the two LoRA runs' losses: ",
}

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the source distribution has no notebooks/")


def test_all_are_known():
    assert [path.stem for path in NOTEBOOKS] == sorted(SAYS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.get("text", "") for output in outputs)
    assert SAYS[path.stem] in text
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert pictures
    folder = os.environ.get("FORGE_HF_KEEP_NOTEBOOKS")
    if folder:
        nbformat.write(notebook, Path(folder) / path.name)
