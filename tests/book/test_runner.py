"""The summing of ``make test``: what failed is never counted as passed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tools import run_tests


def test_a_report_is_summed(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite tests='7' failures='2' errors='1' skipped='1'/>"
        "<testsuite tests='2' failures='0' errors='0' skipped='0'/></testsuites>"
    )
    assert run_tests.read_report(report) == Counter(passed=5, failed=3, skipped=1)


@pytest.mark.parametrize(
    ("count", "line", "code"),
    [
        (Counter(passed=3), "3 passed, 0 failed", 0),
        (Counter(passed=3, skipped=2), "3 passed, 0 failed, 2 skipped", 0),
        (Counter(passed=3, failed=1), "3 passed, 1 failed", 1),
        (Counter(skipped=2), "0 passed, 0 failed, 2 skipped", 1),
        (Counter(), "0 passed, 0 failed", 1),
    ],
)
def test_the_last_line_and_the_exit_code(
    count: Counter[str],
    line: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run_tests, "STAGES", {"one": lambda: count})
    assert run_tests.main([]) == code
    assert capsys.readouterr().out.splitlines()[-1] == line


def test_pytest_that_breaks_off_or_collects_nothing_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_tests, "REPORTS", tmp_path)
    (tmp_path / "test_empty.py").write_text("")
    assert run_tests.pytest("empty", str(tmp_path / "test_empty.py"))["failed"] == 1
    assert run_tests.pytest("absent", str(tmp_path / "absent.py"))["failed"] == 1


def test_an_unknown_stage_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tests.main(["lnt"]) == 2
    assert "lnt" in capsys.readouterr().err
