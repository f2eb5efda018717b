//! The same work on several things at once, on as many threads as there are cores.

use std::sync::{Mutex, PoisonError};
use std::thread;

/// What the work makes of each item, in their order.
pub fn map<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    map_into(items.iter().collect(), work)
}

/// The same of items that the work takes.
pub fn map_into<T: Send, R: Send>(items: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    let threads = thread::available_parallelism().map_or(1, usize::from).min(items.len());
    if threads < 2 {
        return items.into_iter().map(work).collect();
    }
    let results = Mutex::new(Vec::with_capacity(items.len()));
    let left = Mutex::new(items.into_iter().enumerate());
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let next = left.lock().unwrap_or_else(PoisonError::into_inner).next();
                    let Some((number, item)) = next else { break };
                    let result = work(item);
                    results.lock().unwrap_or_else(PoisonError::into_inner).push((number, result));
                }
            });
        }
    });
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.sort_by_key(|(number, _)| *number);
    results.into_iter().map(|(_, result)| result).collect()
}
