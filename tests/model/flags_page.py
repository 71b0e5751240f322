"""The tables of flags on pages, printed from the declared settings.

`python -m tests.model.flags_page` writes them anew; `test_flags.py` says that they are so.
"""

from pathlib import Path

from model.bench.args import bench_flags
from model.cli.args import run_flags
from model.cluster.args import cluster_flags
from model.serve.args import serve_flags

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {
    "running.md": (run_flags(), bench_flags()),
    "serving.md": (serve_flags(),),
    "scaling.md": (cluster_flags(),),
}
BEGIN = "<!-- printed by `python -m tests.model.flags_page` -->\n"
END = "<!-- until here -->\n"


def tables(flags):
    """Every flag of a command, a table a group."""
    lines = [f"### {flags.prog}\n"]
    for title, rows in flags.rows().items():
        lines += [f"| {title} | | default | |", "|---|---|---|---|"]
        lines += [
            f"| {row.flag} | {f'`{row.value}`' if row.value else ''} | {row.default} | "
            f"{row.help.replace('|', chr(92) + '|')} |"
            for row in rows
        ]
        lines.append("")
    return "\n".join(lines) + "\n"


def printed(text, commands):
    """A page with its tables printed anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + "".join(map(tables, commands)) + END + after


if __name__ == "__main__":
    for name, commands in PAGES.items():
        text = (DOCS / name).read_text(encoding="utf-8")
        (DOCS / name).write_text(printed(text, commands), encoding="utf-8")
