"""Triton kernels, the only place that imports triton; enter through `forge_hf.kernels.launch`.

Names in shapes, here and in every file below: T tokens, N out features, K in features.
"""
