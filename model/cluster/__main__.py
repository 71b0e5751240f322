"""The command line of several replicas: `python -m model.cluster`.

Decides: in which order a process starts: flags are read before Ray is loaded.

Does not know: how anything is served.
"""

from model.cli.exits import leaves

if __name__ == "__main__":
    with leaves():
        import importlib
        import sys

        from model.cluster.args import parse_args

        options = parse_args()
        try:
            importlib.import_module("ray.serve")
        except ImportError as error:
            from model.errors import UsageError

            raise UsageError(
                f"ray: wanted it installed, as pip install 'ray[serve]': {error}"
            ) from error

        from model.cluster.session import run

        sys.exit(run(options))
