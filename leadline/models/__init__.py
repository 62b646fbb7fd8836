"""The models: they see a ``ForwardBatch`` and cache fields, and call ``kernels.ops``."""
