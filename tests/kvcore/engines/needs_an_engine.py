"""An adapter as those in `tests/engines`, where the engine that it is for is not here."""

import os

HERE = os.environ["AN_ENGINE_THAT_IS_NOWHERE"]
