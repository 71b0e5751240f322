"""The findings of a conformance run: one record a check and case, printable and as JSON."""

from dataclasses import asdict, dataclass


class ConformanceError(Exception):
    """A backend broke a promise; the message says which and where."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check on one case."""

    check: str
    """The promise: accuracy, poison, untouched, repeatable, permutation, store_kv, ..."""
    case: str
    passed: bool
    detail: str = ""
    """The reason why it failed; empty if it passed."""
    ratio: float | None = None
    """Error over the error allowed, where the check measures one."""


@dataclass(frozen=True, slots=True)
class Report:
    """All findings of a run on one backend."""

    backend: str
    device: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """True if there was a check, and every one passed."""
        return bool(self.findings) and all(finding.passed for finding in self.findings)

    @property
    def failed_checks(self) -> frozenset[str]:
        """Names of the checks that failed on some case."""
        return frozenset(finding.check for finding in self.findings if not finding.passed)

    @property
    def worst_ratio(self) -> float:
        """The largest error over the error allowed; 1 is the limit."""
        return max((f.ratio for f in self.findings if f.ratio is not None), default=0.0)

    def as_json(self) -> dict[str, object]:
        """Plain data for `json.dumps`."""
        return {
            "backend": self.backend,
            "device": self.device,
            "passed": self.passed,
            "worst_ratio": self.worst_ratio,
            "findings": [asdict(finding) for finding in self.findings],
        }

    def as_text(self) -> str:
        """A line for each failure and a closing line."""
        lines = [f"FAILED {f.check} [{f.case}]: {f.detail}" for f in self.findings if not f.passed]
        verdict = "conforms" if self.passed else "does not conform"
        failed = sum(not finding.passed for finding in self.findings)
        lines.append(
            f"{self.backend} on {self.device} {verdict}: {len(self.findings) - failed} of"
            f" {len(self.findings)} checks passed; errors up to {self.worst_ratio:.2f} of the limit"
        )
        return "\n".join(lines)
