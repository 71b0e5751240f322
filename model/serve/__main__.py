"""The server's command line: `python -m model.serve`.

Decides: in which order a process starts. Its socket is open before anything slow is loaded, so that
a port in use is reported at once, and a client gets status 503 while the model loads.

Does not know: how requests are answered.
"""

from model.cli.exits import leaves

if __name__ == "__main__":
    with leaves():
        import sys

        from model.cli import prefetch
        from model.cli.imports import importing
        from model.serve.args import parse_args
        from model.serve.listener import listen

        options = parse_args()
        if options.model.follows:
            from model.cli.start import follow

            sys.exit(follow(options.model, options.engine))
        listener = listen(options.serve)
        has_torch = prefetch.begin(options.model, options.engine)

        with importing():
            from model.serve.process import serve

        sys.exit(serve(options, listener, has_torch))
