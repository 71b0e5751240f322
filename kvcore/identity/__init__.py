"""The identity of content: token ids, multimodal items, namespaces, block hashes."""
