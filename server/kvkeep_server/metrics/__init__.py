"""Prometheus metrics: what there is (`catalog`), how it is read, rendered and served."""
