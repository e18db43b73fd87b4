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

import pytest  # noqa: E402


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
