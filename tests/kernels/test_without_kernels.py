"""Operations on a CPU where no kernel runs: their references serve, behind the same checks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulation import only_where_interpreted

pytestmark = only_where_interpreted

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "files",
    [
        ["references_on_cpu.py"],
        pytest.param(
            [
                "attention/test_attention_arguments.py",
                "attention/test_kv_store.py",
                "latent/test_latent_store.py",
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [
                "recurrent/test_recurrent_calls.py",
                "pages/test_pages.py",
                "attention/test_attention_merge.py",
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["results", "attention", "states_and_pages"],
)
def test_references_serve_and_refuse_without_the_interpreter(files):
    names = [f"tests/kernels/{name}" for name in files]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *names]
    environment = os.environ | {"ONLY_REFERENCES": "1"}

    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
