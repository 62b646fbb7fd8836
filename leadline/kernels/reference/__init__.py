"""What each op means, in plain torch: the definition that every faster version is held to.

All of it runs in float32, bfloat16 and float64. Sums are accumulated in float32, or in float64 when
the activations are float64; results are rounded once, to the dtype of the activations.
"""
