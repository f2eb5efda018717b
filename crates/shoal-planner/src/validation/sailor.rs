//! Per-layer profiles, and exact plans with the step times and memory that were measured.
