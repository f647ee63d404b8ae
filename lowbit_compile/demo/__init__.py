"""The demo: one small language model trained twice, in BF16 and through the ``lowbit`` backend, on the same batches."""
