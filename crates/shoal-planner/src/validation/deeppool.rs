//! Per-layer A100 profiles by batch.
