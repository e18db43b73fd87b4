"""Session set-up: kernels run in Triton's interpreter without a GPU; nothing reaches the network."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernel modules are imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers share the cores; more threads than that only wait for each other.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start

import pytest  # noqa: E402


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


_ROWS: dict = {}


@pytest.fixture(autouse=True)
def _compatibility_row(request, monkeypatch):
    """Keep what a test with the marker `compatibility` found for docs/compatibility.md."""
    from tests import compatibility

    row = compatibility.row_of(request.node)
    if row is None:
        yield
        return
    from forge_hf import ForgeRefusal

    refusals: list = []
    original = ForgeRefusal.__init__
    monkeypatch.setattr(
        ForgeRefusal,
        "__init__",
        lambda self, *args: (refusals.append(str(args[0])), original(self, *args))[1],
    )
    compatibility.start()
    yield
    file = request.node.nodeid.partition("::")[0]
    request.node.user_properties.append(("compatibility", [*row, compatibility.result(refusals), file]))


_NOT_RUN: dict = {}


def pytest_runtest_logreport(report):
    """Runs where all results come together, under pytest-xdist too."""
    if report.when == "call" and report.skipped:
        _NOT_RUN[report.nodeid] = "not run: " + report.longrepr[2].removeprefix("Skipped: ")
    if report.when == "teardown" and report.passed:
        for key, value in report.user_properties:
            if key == "compatibility":
                _ROWS[tuple(value[:3])] = (_NOT_RUN.get(report.nodeid, value[3]), value[4])


def pytest_sessionfinish(session, exitstatus):
    """Write the page where it is asked for and everything passed."""
    if (
        os.environ.get("FORGE_HF_WRITE_DOCS") == "1"
        and exitstatus == 0
        and not hasattr(session.config, "workerinput")
    ):
        from tests.compatibility import PAGE, page

        PAGE.write_text(page(_ROWS), encoding="utf-8")
