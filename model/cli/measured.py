"""The result of a measurement: values for programs, and lines for people.

Does not know: what was measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

COMMON_TOKENS = 1000
"""Token ids below it are in every vocabulary."""


@dataclass(slots=True)
class Report:
    """A measurement.

    Attributes:
        values: by name, as JSON has them; times in milliseconds.
        lines: the same in words.
    """

    values: dict[str, object] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All lines as one text. O(lines)."""
        return "\n".join(self.lines)

    def add_rates(self, seconds: float, counts: Mapping[str, int]) -> None:
        """Add the total time, and the count of each thing a second. O(counts)."""
        self.values["duration_s"] = seconds
        self.lines.append(f"duration: {seconds:.2f} s")
        for name, count in counts.items():
            self.values[f"{name.replace(' ', '_')}_per_s"] = count / seconds
            self.lines.append(f"{name}: {count:,}, {count / seconds:,.1f} a second")

    def add_times(self, name: str, words: str, seconds: Sequence[float]) -> None:
        """Add the spread of some times. O(n log n)."""
        if not seconds:
            return
        ordered = sorted(1000 * each for each in seconds)
        spread = {
            "mean": fmean(ordered),
            "median": median(ordered),
            "p90": ordered[min(len(ordered) - 1, len(ordered) * 90 // 100)],
            "p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
        }
        self.values[name] = spread
        told = ", ".join(f"{kind} {value:,.1f}" for kind, value in spread.items())
        self.lines.append(f"{words}, ms: {told}")
