"""The bridge to transformers and accelerate: the only place that imports those libraries, and only when asked."""
