"""Leaves the adapter's tests out where a Transformers is installed that kvcore refuses."""

collect_ignore_glob = []
try:
    import kvcore.adapters.transformers_versions  # noqa: F401
except ImportError:
    collect_ignore_glob = ["test_transformers_*"]
