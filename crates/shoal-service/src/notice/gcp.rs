//! Compute Engine's metadata: whether the instance has been preempted, which turns to TRUE thirty seconds ahead. An answer
//! without the service's own header is somebody else's.

use std::time::Duration;

use super::{Notice, Notices, ask, status, text_of};
use crate::http::Target;

const AHEAD_MS: u64 = 30_000;
const FLAVOR: (&str, &str) = ("Metadata-Flavor", "Google");

pub struct Gcp {
    target: Target,
}

impl Gcp {
    pub fn new(target: Target) -> Gcp {
        Gcp { target }
    }
}

impl Notices for Gcp {
    fn cloud(&self) -> &'static str {
        "Google Cloud"
    }

    fn every(&self) -> Duration {
        Duration::from_secs(1)
    }

    fn poll(&mut self, _now_ms: u64) -> Result<Option<Notice>, String> {
        let answer = ask(&self.target, "GET", "/computeMetadata/v1/instance/preempted", &[FLAVOR])?;
        if answer.status != 200 {
            return Err(status(&answer));
        }
        if answer.headers.get(FLAVOR.0).is_none_or(|flavor| flavor != FLAVOR.1) {
            return Err("it is not Google's metadata service".into());
        }
        match text_of(&answer)? {
            "TRUE" => Ok(Some(Notice { in_ms: AHEAD_MS })),
            "FALSE" => Ok(None),
            other => Err(format!("it answered {other:?}")),
        }
    }
}
