"""The bridge to transformers and accelerate: the only place that imports them, and only when asked."""
