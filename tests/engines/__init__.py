"""Other engines' allocators behind `kvcore.testing`; each needs its engine, so none is collected.

`python -m kvcore.testing tests.engines.vllm_0_32:Scheduled`, in an environment that has the engine.
"""
