"""How Sphinx builds the documentation site: `python -m sphinx -W -b html docs build/site`.

Pages are Markdown (MyST), API pages come from docstrings (autodoc), and what the code knows
(flags, metrics, errors, architectures, the corpus of bugs, measured results) is generated here, at
each build, into `docs/_generated`, which is never stored.
"""

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]

from _generate import write_pages  # noqa: E402

import kvcore  # noqa: E402  # found by the line above

project = "kvcore"
author = "The kvcore authors"
project_copyright = author
version = release = kvcore.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_generated", "examples", "data"]
smartquotes = False  # "--flag" stays what it is
default_role = "literal"  # docstrings write `names` like this
language = "en"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"kvcore {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_extra_path: list[str] = []

write_pages(DOCS / "_generated")
