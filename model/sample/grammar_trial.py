"""A program that compiles a grammar to find out whether that is safe.

An untrusted grammar is first compiled here, because the library can overflow the stack, which ends
its process, or take hours and all memory.

    python -I -S grammar_trial.py LIBRARY CPU_SECONDS MEMORY_BYTES STACK_BYTES < GRAMMAR

Prints the library's error message; nothing if the grammar compiles. It imports only the library's
binary, so it starts in some milliseconds.

Does not know: the model's tokens, how a grammar is written.
"""

import os
import sys
import threading
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location

if sys.platform != "win32":
    import resource


def main(library: str, cpu_s: int, memory_bytes: int, stack_bytes: int) -> None:
    """Compile the grammar on stdin within these limits.

    Raises:
        ImportError: the library cannot be loaded.
    """
    loader = ExtensionFileLoader("llguidance._lib", library)
    spec = spec_from_file_location(loader.name, library, loader=loader)
    if spec is None:
        raise ImportError(library)
    llguidance = module_from_spec(spec)
    loader.exec_module(llguidance)
    if sys.platform != "win32":  # there only the caller's time limit applies
        os.nice(5)  # requests that run come first
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    grammar = sys.stdin.read()
    limits = llguidance.LLParserLimits(verbose_errors=False)
    threading.stack_size(stack_bytes)
    thread = threading.Thread(
        target=lambda: print(llguidance.LLMatcher.validate_grammar(grammar, limits=limits))
    )
    thread.start()
    thread.join()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
