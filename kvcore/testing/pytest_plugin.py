"""`pytest --kvcore MODULE:FACTORY`: a test for each machine.

A conftest loads it: `pytest_plugins = ["kvcore.testing.pytest_plugin"]`. It is no entry point: a
pytest that tests something else need not load Hypothesis. The same without a flag is
`allocator_tests(MyAdapter)`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcore.testing.answers import check_adapter
from kvcore.testing.command import load
from kvcore.testing.errors import AdapterError, BrokenError
from kvcore.testing.hunt import PROFILES, hunt
from kvcore.testing.machine import AllocatorMachine
from kvcore.testing.machines import machines_for


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flags."""
    group = parser.getgroup("kvcore", "property tests of a KV-cache allocator")
    add = group.addoption
    add("--kvcore", action="append", default=[], metavar="MODULE:FACTORY", help="an adapter")
    add("--kvcore-profile", choices=PROFILES, default="default", help="how much is searched")
    add("--kvcore-seed", type=int, default=0, help="where the search begins")
    add("--kvcore-known", action="append", default=[], metavar="KEY", help="continue past it")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add a test for each adapter and machine."""
    for name in config.getoption("--kvcore"):
        try:
            make = load(name)
            machines = machines_for(check_adapter(make()))
        except AdapterError as error:
            raise pytest.UsageError(f"--kvcore {name}: {error}") from error
        items.extend(
            MachineItem.from_parent(
                session, name=f"{name}::{machine.__name__}", make=make, machine=machine
            )
            for machine in machines
        )


class MachineItem(pytest.Item):
    """One machine against one allocator.

    Args:
        make: makes an adapter.
        machine: the machine that drives it.
    """

    def __init__(
        self,
        *,
        name: str,
        parent: pytest.Session,
        make: Callable[[], object],
        machine: type[AllocatorMachine],
    ) -> None:
        super().__init__(name, parent)
        self.make = make
        self.machine = machine

    def runtest(self) -> None:
        """Search, and raise what was found."""
        option = self.config.getoption
        result = hunt(
            self.make,
            [self.machine],
            profile=option("--kvcore-profile"),
            seed=option("--kvcore-seed"),
            known=option("--kvcore-known"),
        )
        for finding in result.findings:
            raise BrokenError(finding.message, finding.drawn)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException]) -> str:  # type: ignore[override]
        """Show the program alone, without the traceback."""
        if isinstance(excinfo.value, BrokenError):
            return str(excinfo.value)
        return str(super().repr_failure(excinfo))

    def reportinfo(self) -> tuple[str, int | None, str]:
        """Return the origin of the test."""
        return "kvcore.testing", None, self.name
