//! A prediction beside a measurement, and what many of them say together.

use serde::Serialize;

/// How many of a group's worst rows are named.
const WORST: usize = 5;

/// What our models say and what was seen, in the same unit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Compared {
    pub predicted: f64,
    pub measured: f64,
    /// What the prediction lies above the measurement, as a share of it; negative where it lies below.
    pub error: f64,
}

impl Compared {
    /// The measurement is more than nothing.
    pub fn new(predicted: f64, measured: f64) -> Compared {
        assert!(measured > 0.0, "nothing was measured");
        Compared { predicted, measured, error: predicted / measured - 1.0 }
    }
}

/// One measurement by its name.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    pub name: String,
    #[serde(flatten)]
    pub compared: Compared,
}

/// Rows that belong together.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Group {
    pub name: String,
    pub rows: usize,
    pub mean_absolute_error: f64,
    /// With their signs: whether predictions lie above or below on the whole.
    pub mean_error: f64,
    /// The rows furthest off, the worst first.
    pub worst: Vec<Row>,
}

impl Group {
    /// Of some rows; none where there are none.
    pub fn of(name: impl Into<String>, rows: &[Row]) -> Option<Group> {
        let count = rows.len() as f64;
        let mean = |of: fn(f64) -> f64| rows.iter().map(|row| of(row.compared.error)).sum::<f64>() / count;
        let mut worst = rows.to_vec();
        worst.sort_by(|a, b| b.compared.error.abs().total_cmp(&a.compared.error.abs()));
        worst.truncate(WORST);
        (!rows.is_empty()).then(|| Group {
            name: name.into(),
            rows: rows.len(),
            mean_absolute_error: mean(f64::abs),
            mean_error: mean(|error| error),
            worst,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_its_rows_mean_and_names_the_worst() {
        let row = |name: &str, predicted, measured| Row {
            name: name.into(),
            compared: Compared::new(predicted, measured),
        };
        assert_eq!(Group::of("nothing", &[]), None);
        let group = Group::of("some", &[row("a", 1.1, 1.0), row("b", 1.0, 2.0)]).unwrap();
        assert!((group.mean_absolute_error - 0.3).abs() < 1e-12);
        assert!((group.mean_error + 0.2).abs() < 1e-12);
        assert_eq!(group.worst[0].name, "b");
        let text = serde_json::to_string(&group.worst[0]).unwrap();
        assert_eq!(text, r#"{"name":"b","predicted":1.0,"measured":2.0,"error":-0.5}"#);
    }
}
