"""What breaks the contract is refused also after calls that kept it; by test_triton.

The GPU backend does not check a call again whose tensors look like an earlier one's: this is where
a forgotten part of that look would show. In Triton's interpreter.
"""

import sys
from functools import partial

import pytest
import torch

import backends
from backends import InvalidArgumentError
from tests.backends.test_contract import BAD_ATTENTION, BAD_STORES, _attend, _ints, _store

TRITON = backends.get_backend("triton")


def refused(operation, name, **arguments):
    with pytest.raises(InvalidArgumentError) as caught:
        operation(**arguments)
    assert caught.value.argument == name, caught.value


def check_attention():
    def again():
        for change in ({}, {"window": 2}, {"soft_cap": 1.0}, {"sinks": torch.zeros(6)}):
            _attend(TRITON, **change)

    again()
    for change, name, _ in BAD_ATTENTION:
        if "[" not in name:  # of values the GPU backend sees nothing
            refused(partial(_attend, TRITON), name, **change)
    again()


def check_store():
    for change, name in BAD_STORES:
        if "[" not in name:
            _store(TRITON)
            refused(partial(_store, TRITON), name, **change)


def check_slots():
    arguments = {
        "query_start_loc": _ints(0, 1, 4),
        "seq_lens": _ints(5, 3),
        "block_table": torch.tensor([[1, 2], [3, -1]], dtype=torch.int32),
        "block_size": 4,
        "out": torch.zeros(4, dtype=torch.int64),
    }
    for change, name in (
        ({"block_size": 0}, "block_size"),
        ({"out": torch.zeros(4, dtype=torch.int32)}, "out"),
        ({"seq_lens": _ints(5, 3, 1)}, "query_start_loc"),
        ({"block_table": _ints(1, 2)}, "block_table"),
    ):
        TRITON.compute_slot_mapping(**arguments)
        refused(TRITON.compute_slot_mapping, name, **(arguments | change))


if __name__ == "__main__":
    check_attention()
    check_store()
    check_slots()
    sys.stdout.write("nothing bad is accepted\n")
