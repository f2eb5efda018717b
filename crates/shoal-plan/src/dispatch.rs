//! Which of several jobs a device serves next. Pure: the simulator and the engine ask the same question and get the
//! same answer.

/// A job that has a step to do and that no device is doing one of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Waiting {
    pub job: usize,
    /// The lowest goes first.
    pub priority: u32,
    /// What all its steps that are left would take on one device.
    pub remaining_seconds: f64,
    /// What a step takes of the device's memory.
    pub bytes: u64,
}

/// The job whose step a device with so many free bytes takes on: of those that fit the first by priority, then the one
/// that would end last, so that no job is left to run alone when the others are done.
pub fn next(waiting: &[Waiting], free_bytes: u64) -> Option<Waiting> {
    let fits = waiting.iter().filter(|job| job.bytes <= free_bytes);
    let better = |a: &&Waiting, b: &&Waiting| {
        let later = b.remaining_seconds.total_cmp(&a.remaining_seconds);
        a.priority.cmp(&b.priority).then(later).then(a.job.cmp(&b.job))
    };
    fits.min_by(better).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn priority_then_the_longest_of_those_that_fit() {
        let job =
            |job, priority, remaining_seconds, bytes| Waiting { job, priority, remaining_seconds, bytes };
        let jobs = [job(0, 1, 9.0, 1), job(1, 1, 10.0, 5), job(2, 0, 1.0, 3), job(3, 1, 10.0, 5)];
        let chosen = |free| next(&jobs, free).map(|job| job.job);
        assert_eq!(chosen(0), None);
        assert_eq!(chosen(1), Some(0));
        assert_eq!(chosen(5), Some(2));
        assert_eq!(next(&jobs[..2], 5).map(|job| job.job), Some(1));
        assert_eq!(next(&jobs[1..2], 4), None);
        assert_eq!(next(&[jobs[3], jobs[1]], 9).map(|job| job.job), Some(1));
    }
}
