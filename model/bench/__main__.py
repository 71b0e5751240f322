"""The benchmark's command line: `python -m model.bench`.

Decides: in which order a process starts: flags are read before torch and Transformers are loaded.

Does not know: how anything is measured.
"""

from model.cli.exits import leaves

if __name__ == "__main__":
    with leaves():
        from model.bench.args import parse_args

        options = parse_args()
        if options.work.workload == "waste":
            from model.bench import waste_session

            waste_session.execute(options)
        elif options.work.workload == "host":
            from model.bench import host

            host.execute(options)
        else:
            from model.bench import session

            session.execute(options)
