//! What is foreseen on a virtual clock.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Events by their time; of those at the same time the one that was foreseen first comes first, so that a course is a
/// function of what was put in.
pub struct Events<E> {
    heap: BinaryHeap<Timed<E>>,
    number: u64,
}

struct Timed<E> {
    at: f64,
    number: u64,
    event: E,
}

impl<E> PartialEq for Timed<E> {
    fn eq(&self, other: &Timed<E>) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<E> Eq for Timed<E> {}

impl<E> PartialOrd for Timed<E> {
    fn partial_cmp(&self, other: &Timed<E>) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Timed<E> {
    fn cmp(&self, other: &Timed<E>) -> Ordering {
        // A heap gives the greatest.
        other.at.total_cmp(&self.at).then(other.number.cmp(&self.number))
    }
}

impl<E> Default for Events<E> {
    fn default() -> Events<E> {
        Events { heap: BinaryHeap::new(), number: 0 }
    }
}

impl<E> Events<E> {
    pub fn push(&mut self, at: f64, event: E) {
        self.number += 1;
        self.heap.push(Timed { at, number: self.number, event });
    }

    pub fn pop(&mut self) -> Option<(f64, E)> {
        self.heap.pop().map(|Timed { at, event, .. }| (at, event))
    }
}
