//! Seconds as a function of samples: what was measured at some numbers of samples, and what follows for all others.

use serde::{Deserialize, Serialize};

/// Inside the table's range the table, with straight lines between its entries; beyond it a line fitted to all of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TimeCurve {
    /// Rising, at least 1.
    pub samples: Vec<usize>,
    #[serde(serialize_with = "crate::profile::rounded_each")]
    pub seconds: Vec<f64>,
    /// Slope and intercept of the line beyond, where they were published with the table and are not to be fitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<(f64, f64)>,
}

/// A line through the table, by least squares unless one came with it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fit {
    /// Seconds a sample.
    pub slope: f64,
    pub intercept: f64,
    /// Between the line and the table where they lie furthest apart, as a share of the table's value.
    pub worst_relative_error: f64,
}

impl Fit {
    pub fn at(&self, samples: usize) -> f64 {
        self.intercept + self.slope * samples as f64
    }
}

impl TimeCurve {
    pub fn new(samples: Vec<usize>, seconds: Vec<f64>) -> TimeCurve {
        TimeCurve { samples, seconds, line: None }
    }

    /// The same so many times slower.
    pub fn slowed(&self, times: f64) -> TimeCurve {
        TimeCurve {
            samples: self.samples.clone(),
            seconds: self.seconds.iter().map(|seconds| seconds * times).collect(),
            line: self.line.map(|(slope, intercept)| (slope * times, intercept * times)),
        }
    }

    /// What is wrong with it, if anything is: nothing else here can go wrong then.
    pub fn defect(&self) -> Option<String> {
        if self.samples.is_empty() {
            return Some("has no entry".into());
        }
        if self.samples.len() != self.seconds.len() {
            return Some(format!("has {} samples and {} seconds", self.samples.len(), self.seconds.len()));
        }
        if self.samples[0] == 0 || !self.samples.is_sorted_by(|a, b| a < b) {
            return Some(format!("has the samples {:?}, not rising from 1 or more", self.samples));
        }
        let wrong = self.seconds.iter().find(|seconds| !(seconds.is_finite() && **seconds >= 0.0));
        wrong.map(|seconds| format!("has {seconds} seconds"))
    }

    pub fn fit(&self) -> Fit {
        let count = self.samples.len() as f64;
        let points = || self.samples.iter().map(|samples| *samples as f64).zip(self.seconds.iter().copied());
        let (x, y) = points().fold((0.0, 0.0), |(x, y), point| (x + point.0 / count, y + point.1 / count));
        let (xx, xy) = points().fold((0.0, 0.0), |(xx, xy), point| {
            (xx + (point.0 - x) * (point.0 - x), xy + (point.0 - x) * (point.1 - y))
        });
        // One point says nothing of an intercept.
        let slope = if xx > 0.0 { xy / xx } else { y / x };
        let (slope, intercept) = self.line.unwrap_or((slope, y - slope * x));
        let error = |(x, y): (f64, f64)| if y > 0.0 { (intercept + slope * x - y).abs() / y } else { 0.0 };
        Fit { slope, intercept, worst_relative_error: points().map(error).fold(0.0, f64::max) }
    }

    /// Seconds of so many samples.
    ///
    /// # Panics
    /// If the curve has a [`defect`](TimeCurve::defect).
    pub fn at(&self, samples: usize) -> f64 {
        self.at_with(&self.fit(), samples)
    }

    /// The same with the fit at hand.
    pub(crate) fn at_with(&self, fit: &Fit, samples: usize) -> f64 {
        let after = match self.samples.binary_search(&samples) {
            Ok(place) => return self.seconds[place],
            Err(after) => after,
        };
        match after {
            _ if samples == 0 => 0.0,
            // Fewer never take more, nor less than their share.
            0 => {
                let (known, seconds) = (self.samples[0], self.seconds[0]);
                fit.at(samples).max(seconds * samples as f64 / known as f64).min(seconds)
            }
            // Nor do more take less: a line that lies under its last entry waits until it is past it.
            _ if after == self.samples.len() => fit.at(samples).max(self.seconds[after - 1]),
            _ => {
                let (low, high) = (self.samples[after - 1], self.samples[after]);
                let share = (samples - low) as f64 / (high - low) as f64;
                self.seconds[after - 1] + share * (self.seconds[after] - self.seconds[after - 1])
            }
        }
    }

    /// This many times as long.
    pub fn scaled(&self, factor: f64) -> TimeCurve {
        let seconds = self.seconds.iter().map(|seconds| seconds * factor).collect();
        let line = self.line.map(|(slope, intercept)| (slope * factor, intercept * factor));
        TimeCurve { samples: self.samples.clone(), seconds, line }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_line_is_found_and_followed() {
        let curve = TimeCurve::new(vec![2, 4, 8], vec![3.0, 5.0, 9.0]);
        let fit = curve.fit();
        assert!((fit.slope - 1.0).abs() < 1e-12 && (fit.intercept - 1.0).abs() < 1e-12);
        assert!(fit.worst_relative_error < 1e-12);
        for (samples, seconds) in [(0, 0.0), (1, 2.0), (3, 4.0), (6, 7.0), (100, 101.0)] {
            assert!((curve.at(samples) - seconds).abs() < 1e-9, "{samples}");
        }
    }

    #[test]
    fn one_entry_goes_through_the_origin() {
        let curve = TimeCurve::new(vec![4], vec![2.0]);
        assert_eq!((curve.at(1), curve.at(4), curve.at(8)), (0.5, 2.0, 4.0));
    }

    #[test]
    fn a_published_line_is_taken_beyond_the_table() {
        let curve = TimeCurve { line: Some((2.0, 1.0)), ..TimeCurve::new(vec![1, 2], vec![3.5, 5.0]) };
        assert_eq!((curve.at(2), curve.at(10)), (5.0, 21.0));
        assert!((curve.fit().worst_relative_error - 0.5 / 3.5).abs() < 1e-12);
    }

    #[test]
    fn the_error_of_a_fit_is_its_worst() {
        let fit = TimeCurve::new(vec![1, 2, 3], vec![1.0, 4.0, 1.0]).fit();
        assert!((fit.worst_relative_error - 1.0).abs() < 1e-12, "{fit:?}");
    }

    #[test]
    fn defects_are_said() {
        let defect = |samples: &[usize], seconds: &[f64]| {
            TimeCurve::new(samples.to_vec(), seconds.to_vec()).defect().unwrap_or_default()
        };
        assert!(defect(&[], &[]).contains("no entry"));
        assert!(defect(&[1, 2], &[1.0]).contains("1 seconds"));
        assert!(defect(&[2, 1], &[1.0, 2.0]).contains("not rising"));
        assert!(defect(&[0], &[1.0]).contains("not rising"));
        assert!(defect(&[1], &[f64::NAN]).contains("NaN"));
        assert_eq!(defect(&[1], &[1.0]), "");
    }

    /// Tables whose seconds rise with their samples.
    fn rising() -> impl Strategy<Value = TimeCurve> {
        let samples = proptest::collection::btree_set(1usize..512, 1..12);
        samples.prop_flat_map(|samples| {
            let seconds = proptest::collection::vec(0.0..1.0f64, samples.len());
            seconds.prop_map(move |mut seconds| {
                seconds.sort_by(f64::total_cmp);
                TimeCurve::new(samples.iter().copied().collect(), seconds)
            })
        })
    }

    proptest! {
        #[test]
        fn entries_are_exact_and_more_samples_never_take_less(curve in rising()) {
            for (samples, seconds) in curve.samples.iter().zip(&curve.seconds) {
                prop_assert_eq!(curve.at(*samples), *seconds);
            }
            let all: Vec<f64> = (0..1024).map(|samples| curve.at(samples)).collect();
            prop_assert!(all.iter().all(|seconds| *seconds >= 0.0));
            for pair in all.windows(2) {
                prop_assert!(pair[0] <= pair[1] + 1e-12);
            }
        }
    }
}
