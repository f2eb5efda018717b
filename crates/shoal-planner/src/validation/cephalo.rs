//! Per-layer times and memory of many GPU kinds, and a plan of theirs.
