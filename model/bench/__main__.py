"""The benchmark's command line: `python -m model.bench`.

Decides: in which order a process starts: flags are read before torch and Transformers are loaded.

Does not know: how anything is measured.
"""

from model.cli.exits import leaves

if __name__ == "__main__":
    with leaves():
        from model.bench.args import parse_args
        from model.bench.options import HostOptions, WasteOptions

        options = parse_args()

        if isinstance(options, WasteOptions):
            from model.bench import waste_session

            waste_session.execute(options)
        elif isinstance(options, HostOptions):
            from model.bench import host

            host.execute(options)
        else:
            from model.bench import session

            session.execute(options)
