"""Data parallel: a rank with 10 tokens and one with 90 train like one rank with all 100."""

import os
import subprocess
import sys
from pathlib import Path

import gloo_rank
import torch
from loss_cases import CASES, case_id, gradients


def test_two_ranks_with_10_and_90_tokens_equal_one_with_100(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    rendezvous = str(tmp_path / "rendezvous")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, str(Path(gloo_rank.__file__)), rendezvous], env=environment) as other:
        try:
            reduced = gloo_rank.run(0, rendezvous)
            assert other.wait(timeout=60) == 0
        finally:
            other.kill()
    for case, found in zip(CASES, reduced, strict=True):
        tokens = case.tokens(gloo_rank.LENGTHS)
        loss = case.make()(tokens)
        for a, b in zip(gradients(loss.total / loss.count, tokens), found, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-15, msg=lambda m, case=case: f"{case_id(case)}: {m}")
