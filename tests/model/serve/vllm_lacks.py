"""What of the client suite does not apply to vLLM's server, each with the reason."""

import re

LACKS = {}


def reason_to_skip(name, file):
    """Why a test does not apply; None: it does."""
    return next((why for which, why in LACKS.items() if re.match(which, f"{file}::{name}")), None)
