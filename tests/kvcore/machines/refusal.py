"""What a refused call must do: raise the right error, and change nothing."""

from tests.kvcore.views import PropertyError, expect


def refused(prop, error, view, call):
    """`call` must raise `error`, or one of several, and leave what `view()` shows (P3, P4)."""
    before = view()
    names = " or ".join(one.__name__ for one in (error if isinstance(error, tuple) else (error,)))
    try:
        call()
    except error:
        pass
    except Exception as other:
        raise PropertyError(prop, f"wanted {names}, got {other!r}") from other
    else:
        raise PropertyError(prop, f"wanted {names}, the call was accepted")
    expect("P4", view(), before, "state after a refused call")
