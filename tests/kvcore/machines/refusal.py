"""What a refused call must do: raise the right error, and change nothing."""

from tests.kvcore.views import PropertyError, expect


def refused(prop, error, view, call):
    """`call` must raise `error` and leave what `view()` shows as it was (P3, P4)."""
    before = view()
    try:
        call()
    except error:
        pass
    except Exception as other:
        raise PropertyError(prop, f"wanted {error.__name__}, got {other!r}") from other
    else:
        raise PropertyError(prop, f"wanted {error.__name__}, the call was accepted")
    expect("P4", view(), before, "state after a refused call")
