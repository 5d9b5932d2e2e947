"""Operations of a language model, each behind one function that chooses among its implementations.

Owns: paged attention, flash attention with gradients, the write into the paged cache, norms, gated activations, matmuls. Imports
jax and numpy only, is useful alone, and knows nothing of models, requests or schedulers. Every operation is a pure function of
arrays.
"""
