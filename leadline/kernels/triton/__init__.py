"""bf16 ops as Triton kernels: what runs on a GPU. Files are named as in ``reference``.

Kernels use nothing that only Hopper has unless their file says so. Under Triton's interpreter
(``TRITON_INTERPRET=1``) all of them run on a CPU, slowly: that is how CI checks them.
"""

from __future__ import annotations

from leadline.kernels.triton import compressor, engram, norm, sampling

IMPLEMENTATIONS = {
    op.__name__: op
    for op in (
        compressor.store_entries,
        compressor.store_index_keys,
        engram.engram_hash,
        engram.engram_inject,
        engram.gather_rows,
        norm.rms_norm,
        sampling.apply_penalties,
        sampling.greedy,
        sampling.sample,
    )
}
