"""`python -m kvcore.testing MODULE:FACTORY`."""

import sys

from kvcore.testing.command import main

sys.exit(main(sys.argv[1:]))
