"""kvcore as the KV cache manager of vLLM; nothing here is imported before vLLM asks for it."""
