"""Retry a test that is known to depend on the machine's load, and list those that needed it.

``@pytest.mark.load_sensitive(reason="...")`` is the only way to a retry, and there is one. A test without the mark is
run once. pytest loads this file as a plugin (tests/conftest.py).
"""

from __future__ import annotations

import pytest
from _pytest.runner import runtestprotocol

MARK = "load_sensitive"
RETRIED = "retried"  # the user property of a test's reports that carries the reason and the first failure

TIMED_OUT = "from pytest-timeout"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}(reason): depends on the machine's load for this reason; retried once")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        mark = item.get_closest_marker(MARK)
        if mark is not None and not str(mark.kwargs.get("reason", "")).strip():
            raise pytest.UsageError(f'{item.nodeid}: {MARK} needs reason="..."')


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    mark = item.get_closest_marker(MARK)
    if mark is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    failed = next((report for report in reports if report.failed), None)
    if failed is not None and TIMED_OUT not in failed.longreprtext:  # a test that hangs is not tried again
        item.user_properties.append((RETRIED, f"{mark.kwargs['reason']}; first failure: {_last_line(failed)}"))
        item._initrequest()  # type: ignore[attr-defined]  # fixtures are set up again
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _last_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = f"{crash.path}:{crash.lineno}: {crash.message}" if crash is not None else report.longreprtext
    return " ".join(text.split())[:300]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    retried: dict[tuple[str, str], bool] = {}  # whether the second attempt failed as well
    for report in [report for reports in terminalreporter.stats.values() for report in reports]:
        for name, why in getattr(report, "user_properties", ()):
            if name == RETRIED:
                retried[report.nodeid, why] = retried.get((report.nodeid, why), False) or report.failed
    if retried:
        terminalreporter.section(f"retried once, by the mark {MARK}: {len(retried)}")
        for (nodeid, why), failed in sorted(retried.items()):
            terminalreporter.write_line(f"{'failed again' if failed else 'passed'}: {nodeid}: {why}")
