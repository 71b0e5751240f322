"""Small pools to try things on: a token a block, ids by hand."""

import pytest

import kvcore
from tests.kvcore.views import pool_view


def token(number):
    return kvcore.pack([number]).tobytes()


def ids(blocks):
    return [block.block_id for block in blocks]


def published(pool, *tokens):
    """Take a block for each token, one after the other in a prefix."""
    blocks = pool.take(len(tokens))
    pool.publish(blocks, b"n", None, [token(number) for number in tokens])
    return blocks


def refused(pool, error, message, call):
    before = pool_view(pool)
    with pytest.raises(error, match=message):
        call()
    assert pool_view(pool) == before
