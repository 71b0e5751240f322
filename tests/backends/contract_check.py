"""What breaks the contract is refused also after calls that kept it; by test_triton.

The GPU backend does not check a call again whose tensors look like an earlier one's: this is where
a forgotten part of that look would show. In Triton's interpreter.
"""

import sys

import pytest
import torch

import backends
from backends import InvalidArgumentError
from tests.backends.test_contract import BAD_ATTENTION, _attention_arguments, _ints

TRITON = backends.get_backend("triton")


def refused(operation, arguments, name):
    with pytest.raises(InvalidArgumentError) as caught:
        operation(**arguments)
    assert caught.value.argument == name, caught.value


def check_attention():
    def again():
        for change in ({}, {"window": 2}, {"soft_cap": 1.0}, {"sinks": torch.zeros(6)}):
            TRITON.paged_attention(**_attention_arguments(**change))

    again()
    for change, name, _ in BAD_ATTENTION:
        quantised = "k_cache" in change and change["k_cache"].dtype == torch.float8_e4m3fn
        if "[" not in name:  # of values the GPU backend sees nothing
            claimed = not quantised or torch.float8_e4m3fn in TRITON.capabilities.quantised
            arguments = _attention_arguments(**change)
            refused(TRITON.paged_attention, arguments, name if claimed else "k_cache")
    again()


def check_store():
    arguments = {
        "key": torch.ones(2, 2, 8),
        "value": torch.ones(2, 2, 8),
        "k_cache": torch.zeros(5, 4, 2, 8),
        "v_cache": torch.zeros(5, 4, 2, 8),
        "slot_mapping": torch.tensor([0, 3]),
    }
    for change, name in (
        ({"slot_mapping": _ints(1, 2)}, "slot_mapping"),
        ({"slot_mapping": torch.tensor([1, 2, 3])}, "key"),
        ({"key": torch.ones(2, 3, 8)}, "key"),
        ({"key": torch.ones(2, 2, 16)[..., ::2]}, "key"),
        ({"value": torch.ones(2, 2, 8).half()}, "value"),
        ({"v_cache": torch.ones(5, 4, 2, 9)}, "v_cache"),
        ({"v_scale": torch.ones(1)}, "v_scale"),
        ({"key": [1.0]}, "key"),
    ):
        TRITON.store_kv(**arguments)
        refused(TRITON.store_kv, arguments | change, name)


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
        refused(TRITON.compute_slot_mapping, arguments | change, name)


if __name__ == "__main__":
    check_attention()
    check_store()
    check_slots()
    sys.stdout.write("nothing bad is accepted\n")
