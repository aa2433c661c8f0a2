"""What the comparison with other calculators counts as right; asking them needs a network."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks/peers_config.py"
_found = importlib.util.spec_from_file_location("peers_config", SCRIPT)
assert _found is not None
assert _found.loader is not None
peers: Any = importlib.util.module_from_spec(_found)
_found.loader.exec_module(peers)


@pytest.mark.parametrize(
    ("window", "state", "right"),
    [
        (None, 0, {4096 * 300}),
        (1024, 0, {4096 * 100 + 1024 * 200, 4096 * 300}),
        (8192, 0, {4096 * 300}),  # not yet full
        (1024, 7, {614400, 614407, 1228800, 1228807}),
    ],
)
def test_both_views_are_right_with_and_without_state(
    window: int | None, state: int, right: set[int]
) -> None:
    slope = 100 if window else 300
    expected = {
        "kv_bytes_per_token_bf16": slope,
        "kv_bytes_per_token_bf16_all_layers_reserved": 300,
        "sliding_window": window,
        "fixed_state_bytes_per_sequence": state,
    }
    assert peers.right_answers(expected) == right


def test_ours_are_right_or_refused() -> None:
    cases = json.loads(peers.CASES.read_text(encoding="utf-8"))
    known = [c for c in cases if c["expected"]["kv_bytes_per_token_bf16"]]
    _, answers = peers.ask_ours([case["config"] for case in known])
    for case, answer in zip(known, answers, strict=True):
        assert isinstance(answer, str) or answer in peers.right_answers(case["expected"]), case[
            "id"
        ]
    assert sum(isinstance(answer, str) for answer in answers) == 1  # grok-1 names no model type


def test_peers_that_cannot_be_installed_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 'no index here' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(peers, "ENVIRONMENT", tmp_path)
    with pytest.raises(
        SystemExit, match=r"cannot install ridgepoint, hf-mem, kvfit .*no index here"
    ):
        peers.install()
