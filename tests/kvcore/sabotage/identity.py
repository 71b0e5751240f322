"""Identity of namespaces and items, broken: bytes that are not all that a block depends on."""

import struct
from dataclasses import replace

from kvcore.identity.multimodal import encode_items
from kvcore.identity.namespace import encode_namespace
from tests.kvcore.sabotage.registry import patched

WRONG_HIT = ("P7", "P9", "P24")


@patched(encode_namespace, *WRONG_HIT, rows=(35,))
def namespaces_leave_out_the_adapter(namespace):
    return encode_namespace(replace(namespace, lora_name=None, lora_version=0))


@patched(encode_namespace, *WRONG_HIT, rows=(36,))
def namespaces_leave_out_the_version_of_the_adapter(namespace):
    return encode_namespace(replace(namespace, lora_version=0))


@patched(encode_namespace, *WRONG_HIT, rows=(92,))
def namespaces_leave_out_the_weight_epoch(namespace):
    return encode_namespace(replace(namespace, weight_epoch=0))


@patched(encode_namespace, *WRONG_HIT, "P13", rows=(37,))
def namespaces_are_strings_without_tags(namespace):
    name = (namespace.lora_name or "").encode()
    numbers = struct.pack("<QQ", namespace.lora_version, namespace.weight_epoch)
    return b"KVN1" + namespace.salt + name + numbers


@patched(encode_items, *WRONG_HIT, rows=(43,))
def items_are_left_to_their_token_ids(items, first, stop, block_size):
    return encode_items((), first, stop, block_size)


@patched(encode_items, *WRONG_HIT, rows=(33,))
def items_are_bytes_without_a_shape(items, first, stop, block_size):
    shapeless = [replace(item, content=item.content.split()[0]) for item in items]
    return encode_items(shapeless, first, stop, block_size)


@patched(encode_items, *WRONG_HIT, rows=(34,))
def items_are_known_by_16_bits(items, first, stop, block_size):
    cut = [replace(item, content=item.content[:2]) for item in items]
    return encode_items(cut, first, stop, block_size)


@patched(encode_items, *WRONG_HIT, rows=(40,))
def items_leave_out_their_mask(items, first, stop, block_size):
    return encode_items([replace(item, mask=None) for item in items], first, stop, block_size)


@patched(encode_items, *WRONG_HIT, rows=(41,))
def items_with_a_mask_are_cached_without_a_key(items, first, stop, block_size):
    plain = [item for item in items if item.mask is None]
    return encode_items(plain, first, stop, block_size)


@patched(encode_items, *WRONG_HIT, "P10", rows=(39,))
def items_leave_out_where_they_stand(items, first, stop, block_size):
    encoded = [b""] * (stop - first)
    for item in items:
        for number in range(first, stop):
            if number * block_size < item.start + item.length and item.start < (
                (number + 1) * block_size
            ):
                encoded[number - first] += item.content + (item.mask or b"")
    return encoded
