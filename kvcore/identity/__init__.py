"""What identifies content: token ids, multimodal items, namespaces, block hashes."""
